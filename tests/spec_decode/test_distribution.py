"""Rejection sampling gives the target's distribution, and exact verification gives it over seeds. Seeds are fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_spec_decode.cost_table import StepCosts
from scipy.stats import chisquare
from speculating import drafting, fix_seeds
from toys.checkpoints import open_toy, write_toy

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import JudgedRows, SamplingBatch, SamplingRequest, SamplingState
from deepinfer_core.reference.draw import Draw
from deepinfer_core.reference.verify import Verify

ROWS, VOCAB = 20000, 6
CONTEXT: Any = None
"""The stages need nothing of it."""

SMALLEST_P = 1e-4
"""Below it a test fails; with fixed seeds it does so always or never."""


def state(rows: int) -> SamplingState:
    """Every row a request of its own with another seed, temperature 1."""

    def full(value: float, dtype: torch.dtype = torch.int64, *shape: int) -> torch.Tensor:
        return torch.full((rows, *shape), value, dtype=dtype)

    return SamplingState(
        history=full(0, torch.int32, 8),
        prompt_len=full(1),
        temperature=full(1.0, torch.float32),
        min_p=full(0.0, torch.float32),
        top_p=full(1.0, torch.float32),
        top_k=full(0),
        presence=full(0.0, torch.float32),
        frequency=full(0.0, torch.float32),
        repetition=full(1.0, torch.float32),
        seed_lo=torch.arange(rows) * 7919 % 2**32,
        seed_hi=full(12345),
        child=full(0),
        min_end=full(0),
        stop_ids=full(-1, torch.int64, 1),
        bias_ids=full(-1, torch.int64, 1),
        bias_values=full(0.0, torch.float32, 1),
        bad_words=full(-1, torch.int64, 1, 1),
        allowed=None,
    )


def p_value(counts: Any, probabilities: Any) -> float:
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible], probabilities[possible] * counts.sum()).pvalue)


def random_distribution(generator: torch.Generator, support: list[int]) -> torch.Tensor:
    """``[VOCAB]`` float32 scores, -inf off the support."""
    scores = torch.full((VOCAB,), float("-inf"))
    scores[support] = torch.randn(len(support), generator=generator) * 1.5
    return scores


EVERY = list(range(VOCAB))
SUPPORTS = {
    "full": (EVERY, EVERY),
    "disjoint": ([0, 1, 2], [3, 4, 5]),
    "overlapping": ([0, 1, 2, 3], [2, 3, 4, 5]),
    "target narrower": ([1], EVERY),
    "draft narrower": (EVERY, [4]),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("supports", [*SUPPORTS, "same"])
def test_rejection_gives_the_target(supports: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = SUPPORTS.get(supports, (EVERY, EVERY))
    target = random_distribution(generator, first)
    draft = target if supports == "same" else random_distribution(generator, second)
    drafts = torch.multinomial(draft.softmax(0), ROWS, replacement=True, generator=generator)
    batch = _batch(ROWS)
    logits = target.expand(ROWS, VOCAB).contiguous()
    judged = JudgedRows(rows=torch.arange(ROWS), drafts=drafts, scores=draft.expand(ROWS, VOCAB))
    tokens = _verify().run(logits, batch, torch.zeros(ROWS, dtype=torch.int64), judged)
    assert p_value(torch.bincount(tokens, minlength=VOCAB), target.double().softmax(0)) > SMALLEST_P
    accepted = float((tokens == drafts).double().mean())
    overlap = float(torch.minimum(target.double().softmax(0), draft.double().softmax(0)).sum())
    assert accepted == pytest.approx(overlap, abs=0.02)
    if supports == "same":
        assert accepted == 1.0


def test_certain_drafts() -> None:
    """One-hot: taken as often as the target would have said them, and the rest is the target without them."""
    target = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.0, 2.0])
    judged = JudgedRows(rows=torch.arange(ROWS), drafts=torch.full((ROWS,), 5), scores=None)
    tokens = _verify().run(target.expand(ROWS, VOCAB), _batch(ROWS), torch.zeros(ROWS, dtype=torch.int64), judged)
    assert p_value(torch.bincount(tokens, minlength=VOCAB), target.double().softmax(0)) > SMALLEST_P


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_no_distribution_cost_their_draft(broken: float) -> None:
    target = torch.tensor([0.0, 1.0, -1.0, 0.5, -2.0, 2.0])
    scores = torch.full((VOCAB,), broken)
    if broken != float("-inf"):
        scores[1:] = 0.0
    judged = JudgedRows(
        rows=torch.arange(ROWS), drafts=torch.full((ROWS,), 4), scores=scores.expand(ROWS, VOCAB).contiguous()
    )
    tokens = _verify().run(target.expand(ROWS, VOCAB), _batch(ROWS), torch.zeros(ROWS, dtype=torch.int64), judged)
    assert p_value(torch.bincount(tokens, minlength=VOCAB), target.double().softmax(0)) > SMALLEST_P


def test_rows_that_are_not_judged_stay() -> None:
    target = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = torch.tensor([3, -1, 2, 1])
    judged = JudgedRows(rows=torch.tensor([1, 2]), drafts=torch.tensor([0, 4]), scores=torch.full((2, VOCAB), 0.0))
    tokens = _verify().run(target, _batch(4), drawn, judged)
    assert tokens[[0, 1, 3]].tolist() == [3, -1, 1]


def _verify() -> Verify:
    return Verify(SamplingRequest(stage="verify", vocab_size=VOCAB), CONTEXT)


def _batch(rows: int) -> SamplingBatch:
    return SamplingBatch(
        state=state(rows),
        slots=torch.arange(rows),
        positions=torch.full((rows,), 3),
        token_limit=VOCAB,
        active=frozenset(),
        max_position=3,
    )


def test_noise_is_the_one_of_the_position() -> None:
    """Coin and residual have purposes of their own: neither is the noise of a draw at this position."""
    rows = 4000
    batch, flat = _batch(rows), torch.zeros(rows, VOCAB)
    drawn = Draw(SamplingRequest(stage="draw", vocab_size=VOCAB), CONTEXT).run(flat, batch)
    never = torch.full((rows, VOCAB), float("-inf"))
    never[:, 0] = 0.0
    only_other = flat.clone()
    only_other[:, 0] = float("-inf")
    judged = JudgedRows(rows=torch.arange(rows), drafts=torch.zeros(rows, dtype=torch.int64), scores=never)
    residual = _verify().run(only_other, batch, drawn, judged)
    possible = drawn > 0
    assert float((residual == drawn)[possible].double().mean()) == pytest.approx(0.2, abs=0.03)


LOGITS = {"0": 1.0, "1": 0.3, "2": 0.0, "3": -0.5, "4": 1.6}
PAIRS = 25


def _texts(llm: LLM, params: list[SamplingParams]) -> np.ndarray[Any, Any]:
    outputs = llm.generate([[i % 5] for i in range(len(params))], params)
    llm.close()
    return np.array([o.outputs[0].token_ids for o in outputs])


def _pair_p(texts: np.ndarray[Any, Any]) -> float:
    """Chi-square of neighbouring tokens, which are independent."""
    pairs = texts[:, :-1:2] * 5 + texts[:, 1::2]
    single = np.exp([LOGITS[str(i)] for i in range(5)])
    single /= single.sum()
    return p_value(np.bincount(pairs.ravel(), minlength=PAIRS), np.outer(single, single).ravel())


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("schedule", ["fixed", "confidence"])
@pytest.mark.parametrize("certain", [True, False])
def test_the_engine_by_rejection(tmp_path: Path, certain: bool, schedule: str, ahead: bool) -> None:
    directory = write_toy(tmp_path / "toy", "Const", vocab_size=5, logits=LOGITS)
    settings = drafting(
        "told",
        depth=3,
        speculation__verify="rejection",
        speculation__schedule=schedule,
        plugins__device_drafters__certain=certain,
        plugins__device_drafters__right=1,  # so that the drafts of a step differ, and with them their distributions
        plugins__device_drafters__vocab=5,
        plugins__device_drafters__confidence="random",
        scheduling__async_scheduling=ahead,
    )
    llm = open_toy(directory, **settings)
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=None) for _ in range(300)]
    fix_seeds(llm)
    texts = _texts(llm, params)
    assert llm.engine.core.speculator.accepted > 100  # type: ignore[union-attr]
    assert _pair_p(texts) > SMALLEST_P


def test_the_engine_exactly_over_seeds(tmp_path: Path) -> None:
    directory = write_toy(tmp_path / "toy", "Const", vocab_size=5, logits=LOGITS)
    more = {"plugins__device_drafters__certain": False, "plugins__device_drafters__vocab": 5}
    llm = open_toy(directory, **drafting("told", depth=3, **more))
    texts = _texts(llm, [SamplingParams(temperature=1.0, max_tokens=12, seed=s * 977) for s in range(300)])
    assert _pair_p(texts) > SMALLEST_P


def test_a_seed_keeps_its_output_under_rejection(tmp_path: Path) -> None:
    """Requests with a seed are verified exactly whatever the mode, beside others that are not."""
    directory = write_toy(tmp_path / "toy", "Const", vocab_size=5, logits=LOGITS)
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=i if i % 2 else None) for i in range(8)]
    plain = _texts(open_toy(directory), params)
    more = {"plugins__device_drafters__certain": False, "plugins__device_drafters__vocab": 5}
    fast = _texts(open_toy(directory, **drafting("told", speculation__verify="rejection", **more)), params)
    assert (plain[1::2] == fast[1::2]).all()


DRAFTED = {"0": 0.0, "1": 0.0, "2": 0.0, "3": 0.0, "4": 3.0}
"""Scores of a draft model that is surer of 4 than its target is."""


@pytest.mark.parametrize("drained", [False, True], ids=["", "drained"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_schedule_that_verifies_the_likely_drafts(tmp_path: Path, ahead: bool, drained: bool) -> None:
    """What decides whether a draft is verified must not have seen its token, or likely tokens would gain."""
    directory = write_toy(tmp_path / "toy", "Const", vocab_size=5, logits=LOGITS)
    drafts = write_toy(tmp_path / "drafts", "Const", vocab_size=5, logits=DRAFTED)
    settings = drafting(
        "draft_model",
        depth=2,
        speculation__verify="rejection",
        speculation__schedule="confidence",
        plugins__spec_decode__draft_model=str(drafts),
        plugins__spec_decode__cost_cache="off",
        scheduling__async_scheduling=ahead,
    )
    llm = open_toy(directory, **settings)
    core = llm.engine.core
    assert core.runner.drafting is not None
    assert core.planner.drafting is not None
    schedule: Any = core.planner.drafting.schedule
    schedule.costs = StepCosts([(1, 8.5), (101, 58.5)])  # of 16 requests, drafts with a chance of one half pay
    schedule.costs.observe = schedule.observe = lambda cost: None
    schedule.drafts = lambda requests, fresh: requests
    if drained:
        step = core.step

        def step_and_drain() -> Any:
            out = step()
            rest = core.drain()
            out.finished += rest.finished
            out.streamed += rest.streamed
            return out

        core.step = step_and_drain  # type: ignore[method-assign]
    params = [SamplingParams(temperature=1.0, max_tokens=12, seed=None) for _ in range(400)]
    fix_seeds(llm)
    texts = _texts(llm, params)
    speculator = core.speculator
    assert speculator is not None
    assert speculator.proposed > 500
    assert _pair_p(texts) > SMALLEST_P
