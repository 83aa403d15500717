"""A22: an expert that several processes hold is counted once, a process without rows takes part, experts may move."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from deepinfer_core.api import ExpertParallelRequest, ExpertPlacement, MoeExchangeRequest
from deepinfer_core.conformance.member import Step
from deepinfer_core.conformance.operators.expert_parallel import SIZED, drawn_rows
from deepinfer_core.conformance.ranks import Ranks
from deepinfer_core.conformance.target import open_target

JOIN = "deepinfer_core.conformance.member:join"
ASK = "deepinfer_core.conformance.member:dispatch_and_combine"
HELD = ExpertPlacement(experts=4, slots=((0, 1, 2), (3, 0, 1)))
MOVED = ExpertPlacement(experts=4, slots=((3, 2, 0), (1, 0, 3)))
ONCE = ExpertPlacement(experts=4, slots=((0, 1, -1), (2, 3, -1)))


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two processes, with 60 seconds for whatever they are asked."""
    ranks = Ranks(2, JOIN, "reference", ())
    yield ranks
    ranks.close()


def token(placement: ExpertPlacement, rows: int = 1) -> Step:
    """Token 1.0 for experts 0 and 3, half each: expert e multiplies by e + 1."""
    ids, weights = torch.tensor([[0, 3]]).repeat(rows, 1), torch.full((rows, 2), 0.5)
    return Step(placement=placement, x=torch.ones(rows, 1).numpy(), ids=ids.numpy(), weights=weights.numpy())


def sums(pair: Ranks, first: Sequence[Step], second: Sequence[Step]) -> list[list[list[float]]]:
    """What each process got back, step by step."""
    request = ExpertParallelRequest(experts=4, top_k=2, hidden=1, dtype="float32", ranks=2, slots=3)
    found = pair.ask(ASK, [(request, (), frozenset(), steps) for steps in (first, second)])
    return [[answer.combined.flatten().tolist() for answer in answers] for answers in found]


@pytest.mark.parametrize("placement", [HELD, MOVED, ONCE], ids=["copies", "other copies", "no copies"])
def test_counted_once(pair: Ranks, placement: ExpertPlacement) -> None:
    assert sums(pair, [token(placement)], [token(placement)]) == [[[2.5]], [[2.5]]]


def test_a_process_without_rows_for_twenty_steps(pair: Ranks) -> None:
    busy = [token(HELD, 3)] * 22
    idle = [token(HELD), *[token(HELD, 0)] * 20, token(HELD)]
    assert sums(pair, busy, idle) == [[[2.5] * 3] * 22, [[2.5], *[[]] * 20, [2.5]]]


def test_experts_move_between_two_steps(pair: Ranks) -> None:
    steps = [token(HELD, 2), token(MOVED, 2), token(ONCE, 2), token(HELD, 2)]
    assert sums(pair, steps, steps) == [[[2.5, 2.5]] * 4] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sums_have_the_bits_of_one_process(pair: Ranks, dtype: str) -> None:
    """Fresh rows and another split of the tokens each run, against the exchange inside one process."""
    draw = torch.Generator().manual_seed(random.getrandbits(31))
    experts, top_k, hidden = SIZED
    cut = int(torch.randint(0, 21, (1,), generator=draw))
    ((x, ids, weights),) = drawn_rows(draw, [20], dtype, SIZED)
    placement = ExpertPlacement.in_order(experts, 2, redundant=2)
    request = ExpertParallelRequest(
        experts=experts, top_k=top_k, hidden=hidden, dtype=dtype, ranks=2, slots=placement.width
    )
    parts = [
        Step(placement=placement, x=x[part].float().numpy(), ids=ids[part].numpy(), weights=weights[part].numpy())
        for part in (slice(cut), slice(cut, None))
    ]
    found = pair.ask(ASK, [(request, (), frozenset(), [part]) for part in parts])
    shared = torch.cat([torch.from_numpy(answer[0].combined) for answer in found])
    target = open_target("reference")
    local = target.choose(MoeExchangeRequest(experts=experts, top_k=top_k, hidden=hidden, dtype=dtype)).operator
    sent = local.dispatch(x, ids, weights)
    owner = torch.arange(experts).repeat_interleave(sent.offsets.diff())
    answers = (sent.rows.double() * (owner + 1)[:, None] * sent.weights[:, None]).to(x.dtype)
    assert torch.equal(shared, local.combine(answers, sent.handle)), cut
    target.close()
