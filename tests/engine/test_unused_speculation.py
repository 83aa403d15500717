"""Settings of speculation without a method are told, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from toys.checkpoints import write_toy

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.config import load_config
from deepinfer_core.engine.planning import make_plan


@pytest.fixture(autouse=True)
def _every_event() -> None:
    structlog.reset_defaults()


def warnings(folder: Path, environ: dict[str, str], **overrides: Any) -> list[str]:
    model = write_toy(folder, "Count")
    config = load_config(
        environ=environ, overrides={"plugins.paths": ["toys.plugin"], "kv_cache.num_blocks": 9, **overrides}
    )
    with capture_logs() as logs, open_checkpoint(model) as checkpoint:
        make_plan(config, checkpoint)
    return [entry["settings"] for entry in logs if "speculation.method" in entry["event"]]


def test_the_originals_variable_alone_makes_no_drafts(tmp_path: Path) -> None:
    (said,) = warnings(tmp_path, {"DEEPINFER_USE_NEXTN_DECODE": "3"})
    assert said.startswith("speculation.max_draft_tokens (")
    assert "DEEPINFER_USE_NEXTN_DECODE" in said


def test_with_a_method_and_without_settings_nothing_is_said(tmp_path: Path) -> None:
    assert warnings(tmp_path / "a", {}) == []
    assert warnings(tmp_path / "b", {}, **{"speculation.method": "ngram", "speculation.max_draft_tokens": 2}) == []
