"""The policy in docs/writing-a-policy.md: pasted, checked, simulated, run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle

from deepinfer_core import SamplingParams
from deepinfer_core.cli import main
from deepinfer_core.conformance.policy import check_policy, policy_factory

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"


@pytest.fixture
def pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's first block of Python, in a file of its own where the user stands."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "my_policy.py").write_text(block[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    return block[1]


def test_it_has_25_lines_and_passes(pasted: str) -> None:
    assert len(pasted.splitlines()) <= 25
    assert check_policy("my_policy:ShortestFirst").findings == ()


def test_it_is_simulated_beside_others(pasted: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--synthetic", "chat", "--requests", "150", "--rate", "1", "--max-running", "4", "--json")
    assert main(["simulate", "--policy", "fcfs,my_policy:ShortestFirst,scheduler:fair", *load]) == 0
    fcfs, mine, fair = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert (fcfs["policy"], mine["policy"], fair["policy"]) == ("fcfs", "my_policy:ShortestFirst", "scheduler:fair")
    assert mine["policy_failures"] == 0
    assert mine["ttft_ms"] != fcfs["ttft_ms"]


def test_it_runs_in_an_engine(pasted: str, toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("PrefixHash", scheduling__max_running=1)
    planner = llm.engine.core.planner
    planner.policy = planner.guard.policy = policy_factory("my_policy:ShortestFirst")()
    prompts = [[i] * n for i, n in enumerate((5, 9, 2, 7))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
    assert ids_of(outputs) == [HashOracle(64, [None]).tokens(p, 4) for p in prompts]
    starts = [output.metrics.first_scheduled for output in outputs]
    assert sorted(range(4), key=lambda i: starts[i]) == [2, 0, 3, 1]
    assert_clean(llm)
