"""The examples run, as a user would run them: installed beside the core, in a process of their own."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs_support import DISTRIBUTIONS, EXAMPLES, Script

from deepinfer_core.api import ENTRY_POINT_GROUP, RequestArrays, SystemView

SMALL = {"kv_cache.num_blocks": 128, "logging.progress": False}


# ---- distributions


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_imports_the_interface_and_nothing_else_of_ours(name: str) -> None:
    files = list((EXAMPLES / name).rglob("*.py"))
    names = {
        node.module
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deepinfer_core")
    }
    assert files
    assert names == {"deepinfer_core.api"}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_needs_a_core_of_its_interface(name: str) -> None:
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "deepinfer-core>=0.1,<1" in project["dependencies"]
    assert list(project["entry-points"]) == [ENTRY_POINT_GROUP]


def test_both_are_listed_and_load_without_torch(python: Script) -> None:
    script = """
import sys
from deepinfer_core.cli import main
code = main(["plugins", "--load", "--json"])
print(code, "torch" in sys.modules)
"""
    listed, _, last = python("-c", script).rstrip().rpartition("\n")
    rows = {row["name"]: row for row in json.loads(listed)}
    assert last == "0 False"
    assert {name: rows[name]["status"] for name in ("acme", "shortest")} == {"acme": "ok", "shortest": "ok"}
    assert rows["shortest"]["settings"] == ["patience"]


# ---- the backend

ACME = """
import json, sys
from deepinfer_core import LLM, SamplingParams
model, small = sys.argv[1], json.loads(sys.argv[2])
prompts, params = ["one", "two and more", "x"], SamplingParams(temperature=0, max_tokens=24, logprobs=0)
found = {}
for name in ("acme", "cpu", "auto"):
    alone = {"plugins.block": ["cpu"]} if name == "acme" else {}
    with LLM(model, accelerator=name, **small, **alone) as llm:
        outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        plan = llm.explain()["plan"]
        found[name] = {
            "ran on": plan["accelerator"],
            "tokens": [output.token_ids for output in outputs],
            "logprobs": [[e[t].logprob for t, e in zip(o.token_ids, o.logprobs)] for o in outputs],
            "providers": {choice["op"]: choice["provider"] for choice in plan["choices"]},
        }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def backends() -> dict[str, Any]:
    return {}


@pytest.fixture
def acme(python: Script, tiny: Path, backends: dict[str, Any]) -> dict[str, Any]:
    """What each backend did with one model; made once."""
    if not backends:
        backends.update(json.loads(python("-c", ACME, str(tiny), json.dumps(SMALL))))
    return backends


def test_a_model_runs_on_the_example_backend_and_says_the_same(acme: dict[str, Any]) -> None:
    assert acme["acme"]["ran on"] == "acme"
    assert acme["acme"]["tokens"] == acme["cpu"]["tokens"]
    for ours, theirs in zip(acme["acme"]["logprobs"], acme["cpu"]["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_one_operator_is_its_own_and_the_rest_is_the_reference(acme: dict[str, Any]) -> None:
    providers = acme["acme"]["providers"]
    assert providers.pop("pointwise.rms_norm") == "acme:fused_norm"
    assert providers
    assert {provider.partition(":")[0] for provider in providers.values()} == {"reference"}


def test_nobody_gets_the_example_backend_unasked(acme: dict[str, Any]) -> None:
    assert acme["auto"]["ran on"] == "cpu"
    assert "acme:fused_norm" not in acme["cpu"]["providers"].values()


NORM = """
import torch
from deepinfer_acme.norm import FusedNorm
from deepinfer_core.api import RmsNormRequest
torch.manual_seed(3)
norm = FusedNorm(RmsNormRequest(hidden=40, eps=1e-5, dtype="float32"), None)
for rows in (0, 1, 7):
    x, r, w = torch.randn(rows, 40) * 100, torch.randn(rows, 40), torch.randn(40)
    total = x.double() + r.double()
    exact = w.double() * total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    kept = x.clone()
    normed, added = norm.add(x, r, w)
    assert torch.equal(x, kept)
    torch.testing.assert_close(added.double(), total, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(normed.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(norm.run(added, w), normed)
print("ok")
"""


def test_its_norm_is_the_formula_in_float64(python: Script) -> None:
    assert python("-c", NORM) == "ok\n"


# ---- the policy

ORDER = """
import json, sys
from deepinfer_core import LLM, SamplingParams
model, small = sys.argv[1], json.loads(sys.argv[2])
prompts, params = ["a" * 30, "b" * 4, "c" * 12], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
for patience in (1e9, 0.0):
    settings = {**small, "scheduling.max_running": 1, "scheduling.policy": "shortest",
                "plugins.shortest.patience": patience}
    with LLM(model, accelerator="cpu", **settings) as llm:
        begun = [result.metrics.first_scheduled for result in llm.generate(prompts, params)]
        print(llm.explain()["plan"]["policy"], sorted(range(3), key=begun.__getitem__))
"""


def test_the_policy_is_asked_and_its_setting_reaches_it(python: Script, tiny: Path) -> None:
    lines = python("-c", ORDER, str(tiny), json.dumps(SMALL)).splitlines()
    assert lines == ["shortest:shortest [1, 2, 0]", "shortest:shortest [0, 1, 2]"]


def arrays(**columns: list[float]) -> RequestArrays:
    count = len(next(iter(columns.values())))
    names = [field for field in RequestArrays.__attrs_attrs__ if field.name != "ids"]
    filled = {field.name: np.array(columns.get(field.name, [0] * count)) for field in names}
    return RequestArrays(ids=[str(i) for i in range(count)], **filled)


def view(waiting: RequestArrays, running: RequestArrays, now: float = 100.0) -> SystemView:
    return SystemView(
        now=now,
        step=1,
        waiting=waiting,
        running=running,
        free_blocks=10,
        total_blocks=20,
        block_size=4,
        max_batch_tokens=64,
        max_running=4,
        tenants=[""],
        step_cost=np.zeros((0, 2)),
    )


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "shortest_policy"))
    from deepinfer_shortest.plugin import ShortestSettings
    from deepinfer_shortest.policy import Shortest

    return Shortest(ShortestSettings(patience=10.0))


NOBODY = arrays(arrival=[])


def test_cached_tokens_make_a_prompt_shorter(shortest: Any) -> None:
    waiting = arrays(arrival=[95.0, 96.0, 97.0], prompt=[50, 30, 40], cached=[30, 0, 15])
    assert shortest.order(view(waiting, NOBODY), 3) == [0, 2, 1]


def test_no_more_than_asked_for(shortest: Any) -> None:
    waiting = arrays(arrival=[95.0, 96.0, 97.0], prompt=[3, 2, 1])
    assert shortest.order(view(waiting, NOBODY), 2) == [2, 1]


def test_those_out_of_patience_come_first_and_oldest_first(shortest: Any) -> None:
    waiting = arrays(arrival=[99.0, 80.0, 90.0, 98.0], prompt=[5, 900, 800, 4])
    assert shortest.order(view(waiting, NOBODY), 4) == [1, 2, 3, 0]


def test_the_least_computed_is_the_first_victim(shortest: Any) -> None:
    assert shortest.victims(view(NOBODY, arrays(computed=[30, 10, 20])), 1) == [1, 2, 0]


def test_nobody_waiting_is_an_empty_order(shortest: Any) -> None:
    assert shortest.order(view(NOBODY, NOBODY), 4) == []


# ---- scripts


def test_offline(python: Script, tiny: Path) -> None:
    lines = python(str(EXAMPLES / "offline.py"), str(tiny)).splitlines()
    results = [line for line in lines if not line.startswith(" ")]
    assert [line.partition(" -> ")[0] for line in results] == [
        "'The capital of France is'",
        "'Water boils at'",
        "'Once upon a time'",
        "'Once upon a time'",
    ]
    assert not any("failed" in line for line in lines)
    assert 1 <= len(lines) - len(results) <= 8  # one line of logprobs for each token of the second prompt


def test_streaming(python: Script, tiny: Path) -> None:
    script = str(EXAMPLES / "streaming.py")
    assert len(python(script, str(tiny)).strip()) > 0


def test_async_many(python: Script, tiny: Path) -> None:
    lines = python(str(EXAMPLES / "async_many.py"), str(tiny)).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["streamed", "finished", "late"]
    assert set(ast.literal_eval(lines[1].partition(":")[2].strip())) <= {"stop", "length"}
    assert lines[2] in ("late: timeout", "late: finished in time")
