"""Cases A18 to A20 (resuming in chunks, penalties one step ahead, aborts in flight) again, under each policy."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from deepinfer_scheduler.plugin import deepinfer_scheduling
from toys.checkpoints import ToyLLM

CASES = Path(__file__).parents[1] / "cases"


FAST = "fair"
"""Hundreds of cases for each policy take a while; all are run in every full test run."""


@pytest.fixture(
    params=[
        pytest.param(info.name, marks=() if info.name == FAST else pytest.mark.slow) for info in deepinfer_scheduling()
    ]
)
def toy_llm(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> ToyLLM:
    """The usual one, with a policy, and no target of time that a busy machine could miss."""

    def make(kind: str, **options: Any) -> Any:
        policy = {"scheduling__policy": request.param, "plugins.scheduler.latency_tpot_target_ms": 1e9}
        return toy_llm(kind, **{**policy, **options})

    return make


def _load(file: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location(f"policy_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return vars(module)


for _file in sorted(CASES.glob("test_a1[89]_*.py")) + sorted(CASES.glob("test_a20_*.py")):
    for _name, _value in _load(_file).items():
        if _name.startswith("test_"):
            globals()[f"test_{_file.stem[5:8]}_{_name[5:]}"] = _value
        elif type(_value).__name__ == "FixtureFunctionDefinition":
            globals()[_name] = _value


def test_the_cases_are_here() -> None:
    found = {name[5:8] for name in globals() if name.startswith("test_a")}
    assert found == {"a18", "a19", "a20"}
    assert sum(name.startswith("test_a") for name in globals()) >= 10
