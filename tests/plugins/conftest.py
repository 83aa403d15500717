"""Fixtures: a place to install throw-away plugins into, a device, the log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from throwaway import Site

from deepinfer_core.api import DeviceInfo, LazyRef


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))
    before = set(sys.modules)
    yield Site(root)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def device() -> DeviceInfo:
    return DeviceInfo(
        backend="acme",
        type="acme",
        arch="a1",
        count=1,
        memory=1 << 30,
        priority=100,
        evidence="/dev/acme0",
        provider=LazyRef("acme:Device"),
    )


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries
