"""A pytest plugin: which kernels each test launched in the interpreter, written as JSON to ``$LAUNCH_REPORT``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LAUNCHED: dict[str, list[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    from launches import recorded_launches

    with recorded_launches() as seen:
        yield
    # Only of tests that passed: a failure leaves the block above.
    LAUNCHED.setdefault(item.nodeid.rpartition("/")[2].partition("[")[0], []).extend({name for name, _ in seen})


def pytest_sessionfinish() -> None:
    Path(os.environ["LAUNCH_REPORT"]).write_text(json.dumps(LAUNCHED), encoding="utf-8")
