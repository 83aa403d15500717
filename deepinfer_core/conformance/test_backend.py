"""What ``pytest --pyargs deepinfer_core.conformance --backend NAME`` collects: one test for each case."""

from __future__ import annotations

import pytest

from deepinfer_core.conformance.pytest_plugin import session_of


def test_conformance(conformance_case: str, request: pytest.FixtureRequest) -> None:
    session = session_of(request.config)
    assert session is not None
    result = session.ask(conformance_case)
    if result.outcome == "skipped":
        pytest.skip(result.message)
    if result.outcome == "refused":
        pytest.skip(f"refused: {result.message}")
    if result.outcome == "known_gap":
        pytest.xfail(result.message)
    if result.outcome == "failed":
        pytest.fail(result.message, pytrace=False)
