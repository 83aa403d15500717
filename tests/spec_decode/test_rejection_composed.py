"""Rejection sampling beside everything that shapes a distribution: what requests say stays as likely as without drafts.

The target's logits depend on the whole prefix, the drafter's on its last tokens alone, so that drafts are right
sometimes. Compared are whole outputs of an engine with drafts and one without, by chi-square. Seeds and costs of steps
are fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_spec_decode.cost_table import StepCosts
from scipy.stats import chi2_contingency
from speculating import drafting, fix_seeds
from test_distribution import SMALLEST_P
from toys.checkpoints import open_toy, write_toy

from deepinfer_core import LLM, SamplingParams

VOCAB, REQUESTS, TOKENS = 5, 1500, 5
RARE = 12
"""Outputs seen less often in both engines together count as one."""

SHAPED: Mapping[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {0: 1.5, 2: -1.0}},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.95, "frequency_penalty": 0.8, "logit_bias": {1: 1.0}},
    "min_tokens": {"stop_token_ids": [2], "min_tokens": 3, "temperature": 1.5},
    "several": {"n": 3, "temperature": 1.5, "presence_penalty": 0.5},
}


def outputs(llm: LLM, params: dict[str, Any], base: int) -> Counter[tuple[int, ...]]:
    """How often each output came; every request with another seed that the user did not give."""
    fix_seeds(llm, base)
    several = params.get("n", 1)
    options = {"temperature": 1.0, **params, "max_tokens": TOKENS, "seed": None}
    found = llm.generate([[1, 3, 0]] * (REQUESTS // several), SamplingParams(**options))
    return Counter(tuple(c.token_ids) for o in found for c in o.outputs)


def same(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """p-value that both come from one distribution."""
    often = [key for key in one.keys() | other.keys() if one[key] + other[key] >= RARE]
    table = np.array([[c[key] for key in often] + [c.total() - sum(c[k] for k in often)] for c in (one, other)])
    return float(chi2_contingency(table[:, table.sum(0) > 0]).pvalue)


QUICK = {("all", "confidence", True), ("penalties", "fixed", False), ("several", "confidence", False)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id=f"{shape}-{schedule}-{loop}")
    for shape in SHAPED
    for schedule in ("fixed", "confidence")
    for loop in ("sync", "async")
    for case in [(shape, schedule, loop == "async")]
]


@pytest.mark.parametrize(("shape", "schedule", "ahead"), CASES)
def test_outputs_are_as_likely_as_without_drafts(tmp_path: Path, shape: str, schedule: str, ahead: bool) -> None:
    target = write_toy(tmp_path / "target", "PrefixHash", vocab_size=VOCAB)
    drafts = write_toy(tmp_path / "drafts", "PrefixHash", vocab_size=VOCAB, groups={"near": 3})
    options = {"kv_cache__num_blocks": 200, "scheduling__max_running": 64, "scheduling__max_batch_tokens": 256}
    with open_toy(target, **options) as plain:
        expected = outputs(plain, SHAPED[shape], 0)
    settings = drafting(
        "draft_model",
        depth=2,
        speculation__verify="rejection",
        speculation__schedule=schedule,
        plugins__spec_decode__draft_model=str(drafts),
        plugins__spec_decode__cost_cache="off",
        scheduling__async_scheduling=ahead,
        **options,
    )
    with open_toy(target, **settings) as fast:
        core = fast.engine.core
        assert core.runner.drafting is not None
        assert core.planner.drafting is not None
        if schedule == "confidence":
            made: Any = core.planner.drafting.schedule
            made.costs = StepCosts([(1, 32.5), (101, 82.5)])  # of 64 requests, drafts with a chance of half pay
            made.observe = lambda cost: None
            made.drafts = lambda requests, fresh: requests
        found = outputs(fast, SHAPED[shape], 10**7)
        assert core.speculator is not None
        assert core.speculator.failures == 0
        assert core.speculator.accepted > 50
    assert same(found, expected) > SMALLEST_P
