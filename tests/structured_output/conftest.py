"""What these tests need beside the plugin itself."""

from __future__ import annotations

import pytest

pytest.importorskip("deepinfer_structured_output")
pytest.importorskip("llguidance")
pytest.importorskip("xgrammar")
