"""The backends of this repository under the kit: tier *boots* in every run of the tests, the rest in the full ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core.conformance import Report, run

FAKE = Path(__file__).parents[1] / "fake_backend"
BACKENDS = {"reference": (), "cpu": (), "fake": ("deepinfer_fake.plugin",)}
"""Name -> plugins that are not installed."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepinfer_fake"]:
        del sys.modules[name]


def failures(report: Report) -> dict[str, str]:
    return {result.case: result.message for result in report.results if result.outcome == "failed"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_boots(backend: str) -> None:
    report = run(backend, tier="boots", plugins=BACKENDS[backend])
    assert failures(report) == {}
    assert report.passed
    assert report.counts()["refused"] == 0
    assert report.counts()["passed"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything(backend: str) -> None:
    report = run(backend, tier="full", plugins=BACKENDS[backend])
    assert failures(report) == {}
    assert report.counts()["passed"] > 400


def test_own_operators_are_what_is_asked() -> None:
    """The host's verdict is about its own operators, not about the reference standing in."""
    report = run("cpu", tier="boots", families=["gemm.linear", "attention.paged"])
    by = {result.message.partition(" ")[0] for result in report.results if result.outcome == "passed"}
    assert by == {"cpu:packed_linear", "cpu:paged_in_place"}
