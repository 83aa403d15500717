"""The region that samples: which steps it serves, and that its tokens are those of the stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys.checkpoints import ToyLLM
from toys.checks import ids_of
from toys.oracle import HashOracle
from toys.sampling_region_plugin import CALLS

from deepinfer_core import SamplingParams
from deepinfer_core.api import JudgedRows
from deepinfer_core.engine.sampler import LogprobRows, Sampler

PLUGINS = ["toys.plugin", "toys.sampling_region_plugin"]
PROMPT = [9, 8, 7, 6, 5]


def seeded(**options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 42, "temperature": 0.8, "max_tokens": 6} | options)


@pytest.fixture(autouse=True)
def none_called() -> None:
    CALLS.clear()


def test_it_serves_and_its_parts_stay(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", plugins__paths=PLUGINS)
    rows = {row["slot"]: row for row in llm.explain()["rows"]}
    assert rows["sample_tokens"]["provider"] == "sampling_region_plugin:sample_tokens"
    assert rows["sample_tokens"]["replaces"] == [f"sampling_{s}" for s in ("temperature", "top_k", "top_p", "draw")]
    assert rows["sample_tokens"]["reason"].startswith("beside sampling_temperature")
    assert rows["sampling_draw"]["provider"] == "cpu:draw"
    expected = HashOracle(64, [None]).tokens(PROMPT, 6, temperature=0.8, seed=42)
    assert ids_of(llm.generate(PROMPT, seeded())) == [expected]
    assert dict(CALLS) == {frozenset({"temperature"}): 6}


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({"temperature": 0.0}, True),
        ({"top_k": 5, "top_p": 0.8}, True),
        ({"top_p": 0.8, "logprobs": 2}, True),
        ({"logprobs": 2, "logprobs_mode": "processed"}, False),
        ({"min_p": 0.1}, False),
        ({"repetition_penalty": 1.3}, False),
        ({"logit_bias": {3: 2.0}}, False),
        ({"allowed_token_ids": [3, 4, 5]}, False),
    ],
)
def test_steps_that_need_another_stage_are_sampled_by_stages(
    toy_llm: ToyLLM, options: dict[str, Any], served: bool
) -> None:
    llm = toy_llm("PrefixHash", plugins__paths=PLUGINS)
    without = toy_llm("PrefixHash", plugins__paths=PLUGINS, ops={"sample_tokens": ["parts"]})
    (found,) = llm.generate(PROMPT, seeded(**options))
    assert bool(CALLS) == served
    CALLS.clear()
    (expected,) = without.generate(PROMPT, seeded(**options))
    assert not CALLS
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs


def test_a_neighbour_that_needs_more_takes_the_step_to_the_stages(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", plugins__paths=PLUGINS)
    alone = ids_of(llm.generate(PROMPT, seeded(max_tokens=9)))
    CALLS.clear()
    together = ids_of(llm.generate([PROMPT, [1, 2]], [seeded(max_tokens=9), seeded(max_tokens=4, min_p=0.2)]))
    assert together[:1] == alone
    assert 0 < sum(CALLS.values()) < 9


def test_padding_of_the_vocabulary_alone_is_no_other_stage(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Flat", tokenizer=True, plugins__paths=PLUGINS)
    without = toy_llm("Flat", tokenizer=True, plugins__paths=PLUGINS, ops={"sample_tokens": ["parts"]})
    params = [seeded(seed=n, max_tokens=20, ignore_eos=True, temperature=5.0) for n in range(8)]
    found = ids_of(llm.generate([[n] for n in range(8)], params))
    assert set(CALLS) == {frozenset({"mask", "temperature"})}
    assert max(token for row in found for token in row) < 261
    assert found == ids_of(without.generate([[n] for n in range(8)], params))
    CALLS.clear()
    llm.generate([[1], [2]], [seeded(), seeded(allowed_token_ids=[3, 4])])
    assert not CALLS


@pytest.mark.parametrize("judged", [False, True])
def test_drafts_judged_by_rejection_are_left_to_the_stages(judged: bool) -> None:
    """They are judged by what the stages leave of the logits."""
    called: list[str] = []

    def op(name: str) -> SimpleNamespace:
        def run(logits: torch.Tensor, *_: Any) -> torch.Tensor:
            called.append(name)
            return torch.zeros(logits.shape[0], dtype=torch.int64) if name != "temperature" else logits

        return SimpleNamespace(run=run)

    names = ("temperature", "draw", "verify", "logprobs")
    ops = SimpleNamespace(sample_tokens=op("region"), **{f"sampling_{name}": op(name) for name in names})
    drafts = JudgedRows(rows=torch.zeros(1).long(), drafts=torch.zeros(1).long(), scores=None) if judged else None
    step: Any = SimpleNamespace(active=frozenset({"temperature"}))
    Sampler(ops, ("temperature", "draw")).run(torch.zeros(2, 8), step, LogprobRows(), drafts)
    assert called == (["temperature", "draw", "verify"] if judged else ["region"])
