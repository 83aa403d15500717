"""Experts on several processes: real processes, each with rows of its own, and what comes back to each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import ExpertParallelRequest, ExpertPlacement
from deepinfer_core.conformance.case import Case, Mismatch, NotApplicable, Refused
from deepinfer_core.conformance.compare import check_close, check_equal
from deepinfer_core.conformance.member import Answer, Step
from deepinfer_core.conformance.ranks import RankLost, Ranks
from deepinfer_core.conformance.target import MAX_TOKENS, REFERENCE, Target
from deepinfer_core.conformance.tolerance import gamma, rounding

from .drawn import ask_drawn
from .operation import generator

FAMILY, OP = "moe_communication", "moe.expert_parallel"
SIZES = (1, 2, 4)
EXAMPLES = 60
EXPERTS, TOP_K, HIDDEN = 6, 3, 32
_MEMBER = "deepinfer_core.conformance.member"

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One process's part of a step: ``x [T, hidden]``, ``ids [T, top_k]``, ``weights [T, top_k]``."""


@attrs.frozen(kw_only=True)
class Turn:
    """One step of all processes: where the experts lie, and the rows of each rank."""

    placement: ExpertPlacement
    rows: Sequence[Rows]


def asked_for(placement: ExpertPlacement, target: Target, dtype: str, top_k: int, hidden: int) -> ExpertParallelRequest:
    """The request that a placement belongs to."""
    return ExpertParallelRequest(
        experts=placement.experts,
        top_k=top_k,
        hidden=hidden,
        dtype=dtype,
        ranks=placement.ranks,
        slots=placement.width,
        device_type=target.device.info.type,
    )


def ask_all(target: Target, request: ExpertParallelRequest, turns: Sequence[Turn]) -> tuple[str, list[list[Answer]]]:
    """Have every process take its part of the turns; who served, and the answers by turn and rank.

    Raises:
        Refused: nobody serves so many processes. Mismatch: a process died, hung or raised.
    """
    try:
        target.choice(request)
    except Refused as error:
        raise Refused(f"serves {'no group' if request.ranks == 1 else 'one process'}: {error}") from error
    parts = [
        [
            Step(
                placement=turn.placement,
                x=turn.rows[rank][0].to(torch.float32).numpy(),
                ids=turn.rows[rank][1].numpy(),
                weights=turn.rows[rank][2].numpy(),
            )
            for turn in turns
        ]
        for rank in range(request.ranks)
    ]
    asked = (request, tuple(target.wanted), target.demands)
    found = processes(target, request.ranks).ask(f"{_MEMBER}:dispatch_and_combine", [(*asked, part) for part in parts])
    return found[0][0].label, [[found[rank][turn] for rank in range(request.ranks)] for turn in range(len(turns))]


def processes(target: Target, size: int) -> Ranks:
    """The group of this many processes, started when it is needed and kept; a group of another size is ended."""
    old: Ranks | None = target.facts.get("ranks")
    if old is not None and old.alive and old.size == size:
        return old
    if old is not None:
        old.close()
    ranks = Ranks(size, f"{_MEMBER}:join", target.backend, tuple(target.plugin_files))
    target.facts["ranks"] = ranks
    target.on_close.append(ranks.close)
    return ranks


def check_turn(label: str, request: ExpertParallelRequest, turn: Turn, answers: Sequence[Answer]) -> None:
    """Every pair of token and expert reached one slot with its weight, and every token got its own results back.

    Raises:
        Mismatch: naming the expert, or the rank.
    """
    dtype: torch.dtype = getattr(torch, request.dtype)
    for rank, slots in enumerate(turn.placement.slots):
        counts = np.diff(answers[rank].offsets)
        strays = [slot for slot, expert in enumerate(slots) if expert < 0 and counts[slot]]
        if strays:
            raise Mismatch(
                f"{label}, dispatch, rank {rank}: found rows in slot {strays[0]}, expected none: it is empty"
            )
    for expert in range(request.experts):
        got, shares = _arrived(turn.placement, answers, expert, request.hidden)
        sent, wanted = _sent(turn.rows, expert)
        if len(got) != len(sent):
            copies = sum(row.count(expert) for row in turn.placement.slots)
            raise Mismatch(
                f"{label}, dispatch, expert {expert}: found {len(got)} rows over all ranks, expected the {len(sent)} "
                f"that were sent, each at one of its {copies} places, once"
            )
        mine, theirs = shares.argsort(stable=True), wanted.argsort(stable=True)
        check_equal(f"{label}, dispatch, weights of expert {expert}", shares[mine], wanted[theirs])
        check_equal(f"{label}, dispatch, rows of expert {expert}", got[mine].to(dtype), sent[theirs].to(dtype))
    for rank, (x, ids, weights) in enumerate(turn.rows):
        factor = (ids + 1).double()[:, :, None] * weights.double()[:, :, None]
        expected, size = (x.double()[:, None] * factor).sum(1), (x.double().abs()[:, None] * factor).sum(1)
        bound = rounding(size, dtype) + gamma(request.top_k) * size
        check_close(f"{label}, combine, rank {rank}", torch.from_numpy(answers[rank].combined), expected, bound)


def _arrived(
    placement: ExpertPlacement, answers: Sequence[Answer], expert: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights that came to an expert's slots, over all ranks."""
    rows, weights = [np.zeros((0, hidden), np.float32)], [np.zeros(0, np.float32)]
    for answer, slots in zip(answers, placement.slots, strict=True):
        for slot in (slot for slot, held in enumerate(slots) if held == expert):
            part = slice(answer.offsets[slot], answer.offsets[slot + 1])
            rows.append(answer.rows[part])
            weights.append(answer.weights[part])
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(weights))


def _sent(rows: Sequence[Rows], expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    found, weights = [], []
    for x, ids, shares in rows:
        token, place = (ids == expert).nonzero(as_tuple=True)
        found.append(x[token].to(torch.float32))
        weights.append(shares[token, place])
    return torch.cat(found), torch.cat(weights)


def drawn_rows(draw: torch.Generator, counts: Sequence[int], dtype: str, sizes: tuple[int, int, int]) -> list[Rows]:
    """For each rank so many tokens; their experts differ, ascending, and no weight is equal to another.

    ``sizes``: experts, top_k, hidden.
    """
    experts, top_k, hidden = sizes
    total = sum(counts) * top_k
    weights = (torch.randperm(total, generator=draw) + 1).to(torch.float32) / (total + 1)
    found = []
    for count, shares in zip(counts, torch.split(weights, [count * top_k for count in counts]), strict=True):
        x = torch.randn(count, hidden, generator=draw).to(getattr(torch, dtype))
        ids = torch.rand(count, experts, generator=draw).argsort(1)[:, :top_k].sort(1).values
        found.append((x, ids, shares.view(count, top_k)))
    return found


def spread(total: int, size: int) -> list[int]:
    """Tokens for each rank: unequal numbers, the third of four has none."""
    return [total // (rank + 1) if rank != 2 else 0 for rank in range(size)]


def _asked(check: Callable[[int, str, Target], str], size: int, dtype: str, target: Target) -> str:
    try:
        return check(size, dtype, target)
    except RankLost as error:
        raise Mismatch(f"{OP} on {size} processes: {error}") from error


def exchanged(size: int, dtype: str, target: Target, turns: Sequence[Turn]) -> tuple[str, list[list[Answer]]]:
    """Ask the turns and check each; all have as many slots."""
    x, ids, _ = turns[0].rows[0]
    request = asked_for(turns[0].placement, target, dtype, ids.shape[1], x.shape[1])
    by, answers = ask_all(target, request, turns)
    for number, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
        check_turn(f"{OP} by {by}, {size} processes, step {number}", request, turn, answer)
    return by, answers


SIZED = (EXPERTS, TOP_K, HIDDEN)


def _round_trip(counts: Callable[[int], Sequence[int]], size: int, dtype: str, target: Target) -> str:
    draw = generator(f"{FAMILY} {size}")
    placement = ExpertPlacement.in_order(EXPERTS, size, redundant=2)
    return exchanged(
        size, dtype, target, [Turn(placement=placement, rows=drawn_rows(draw, counts(size), dtype, SIZED))]
    )[0]


def _idle_rank(size: int, dtype: str, target: Target) -> str:
    """Twenty steps in which the last rank has no rows, between two in which it has some."""
    draw = generator(f"idle {size}")
    placement = ExpertPlacement.in_order(EXPERTS, size, redundant=1)
    busy, idle = [3] * size, [2] * (size - 1) + [0]
    turns = [
        Turn(placement=placement, rows=drawn_rows(draw, counts, dtype, SIZED)) for counts in (busy, *[idle] * 20, busy)
    ]
    return exchanged(size, dtype, target, turns)[0]


def _experts_without_rows(size: int, dtype: str, target: Target) -> str:
    """Everybody's rows go to experts 0 and 1, so that most processes receive none."""
    placement = ExpertPlacement.in_order(EXPERTS, size)
    rows = [
        (x, torch.tensor([[0, 1]]).expand(len(x), 2).clone(), weights)
        for x, _, weights in drawn_rows(generator(f"few {size}"), spread(12, size), dtype, (EXPERTS, 2, HIDDEN))
    ]
    return exchanged(size, dtype, target, [Turn(placement=placement, rows=rows)])[0]


def _rank_without_experts(size: int, dtype: str, target: Target) -> str:
    """The first process holds no expert, the last all that others lack: it sends rows and receives none."""
    if size == 1:
        raise NotApplicable("one process holds all experts")
    slots = [[-1] * EXPERTS, *([rank, -1, rank] + [-1] * (EXPERTS - 3) for rank in range(size - 2)), range(EXPERTS)]
    placement = ExpertPlacement(experts=EXPERTS, slots=slots)
    rows = drawn_rows(generator(f"uneven {size}"), spread(12, size), dtype, SIZED)
    return exchanged(size, dtype, target, [Turn(placement=placement, rows=rows)])[0]


def _counted_once(size: int, dtype: str, target: Target) -> str:
    """Experts 0 and 3 of four, halves, token 1.0 on every rank: 0.5 * 1 + 0.5 * 4 = 2.5, whoever holds copies of 0.

    First with copies of experts 0 and 1, then after experts have moved, then without copies.
    """
    rows = [(torch.ones(1, 1), torch.tensor([[0, 3]]), torch.full((1, 2), 0.5)) for _ in range(size)]
    copies = ExpertPlacement.in_order(4, size, redundant=2)
    moved = ExpertPlacement(experts=4, slots=[row[::-1] for row in reversed(copies.slots)])
    by = ""
    for placements in ((copies, moved, copies), (ExpertPlacement.in_order(4, size),)):
        turns = [Turn(placement=placement, rows=rows) for placement in placements]
        by, answers = ask_all(target, asked_for(placements[0], target, "float32", 2, 1), turns)
        for number, answer in enumerate(answers):
            for rank in range(size):
                label = f"{OP} by {by}, {size} processes, step {number}, combine, rank {rank}"
                check_equal(label, torch.from_numpy(answer[rank].combined), torch.tensor([[2.5]]))
    return by


def _moved(size: int, dtype: str, target: Target) -> str:
    """Experts move between steps: to the neighbour, other copies, and back."""
    draw = generator(f"moved {size}")
    first = ExpertPlacement.in_order(EXPERTS, size, redundant=2)
    other = ExpertPlacement(
        experts=EXPERTS,
        slots=[[(EXPERTS - 1 - expert) for expert in row] for row in (*first.slots[1:], first.slots[0])],
    )
    turns = [
        Turn(placement=placement, rows=drawn_rows(draw, spread(9, size), dtype, SIZED))
        for placement in (first, other, other, first)
    ]
    return exchanged(size, dtype, target, turns)[0]


def _next_step(size: int, dtype: str, target: Target) -> str:
    """The same routing three times, other values: nothing is left over from the step before."""
    placement = ExpertPlacement.in_order(EXPERTS, size, redundant=1)
    rows = drawn_rows(generator(f"next {size}"), spread(9, size), dtype, SIZED)
    turns = [
        Turn(placement=placement, rows=[(x * factor, ids, weights) for x, ids, weights in rows])
        for factor in (1.0, -2.0, 0.5)
    ]
    return exchanged(size, dtype, target, turns)[0]


def _deterministic(size: int, dtype: str, target: Target) -> str:
    draw = generator(f"again {size}")
    placement = ExpertPlacement.in_order(EXPERTS, size, redundant=2)
    _claimed(target, placement, dtype, "deterministic")
    once, between = (
        Turn(placement=placement, rows=drawn_rows(draw, counts, dtype, SIZED))
        for counts in (spread(20, size), spread(7, size))
    )
    by, (first, _, again) = exchanged(size, dtype, target, [once, between, once])
    for rank in range(size):
        for name in ("offsets", "rows", "weights", "combined"):
            found, expected = (torch.from_numpy(getattr(a[rank], name)) for a in (again, first))
            check_equal(f"{OP} by {by}, {size} processes, {name} of rank {rank}", found, expected, "as the first time")
    return by


def _batch_invariant(size: int, dtype: str, target: Target) -> str:
    """A token's sum has the same bits on whichever process, beside whatever rows, wherever the experts lie."""
    placement = ExpertPlacement.in_order(EXPERTS, size, redundant=2)
    _claimed(target, placement, dtype, "batch_invariant")
    moved = ExpertPlacement(experts=EXPERTS, slots=[row[::-1] for row in reversed(placement.slots)])
    total = 23
    ((x, ids, weights),) = drawn_rows(generator("bits"), [total], dtype, (EXPERTS, 5, HIDDEN))
    backwards = torch.arange(total).flip(0)
    company = (
        (torch.arange(total), [total] + [0] * (size - 1), placement),
        (torch.arange(total), [1] * (size - 1) + [total - size + 1], placement),
        (backwards, [0] * (size - 1) + [total], moved),
        (backwards[:5], [5] + [0] * (size - 1), moved),
    )
    turns = [
        Turn(placement=where, rows=[(x[part], ids[part], weights[part]) for part in torch.split(order, counts)])
        for order, counts, where in company
    ]
    by, answers = exchanged(size, dtype, target, turns)
    alone = torch.from_numpy(answers[0][0].combined)
    for number, ((order, _, _), answer) in enumerate(zip(company, answers, strict=True)):
        found = torch.cat([torch.from_numpy(part.combined) for part in answer])
        label = f"{OP} by {by}, {size} processes, step {number}, combine"
        check_equal(label, found, alone[order], "as in other company")
    return by


def _any_turns(size: int, data: Any, target: Target) -> bool:
    """One to three steps: any placement in so many slots, experts without copies or with many, any rows anywhere."""
    from hypothesis import strategies as st

    draw = data.draw
    experts, hidden = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    top_k = draw(st.integers(1, min(experts, 4)))
    width = draw(st.integers(-(-experts // size), experts + 2))
    dtype = draw(st.sampled_from(("float32", "bfloat16", "float16")))
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        more = st.lists(st.integers(-1, experts - 1), min_size=size * width - experts, max_size=size * width - experts)
        slots = draw(st.permutations([*range(experts), *draw(more)]))
        placement = ExpertPlacement(experts=experts, slots=[slots[r * width : (r + 1) * width] for r in range(size)])
        counts = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
        seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        turns.append(Turn(placement=placement, rows=drawn_rows(seed, counts, dtype, (experts, top_k, hidden))))
    _, provider = target.choice(asked_for(turns[0].placement, target, dtype, top_k, hidden))
    if provider.fallback and target.backend != REFERENCE:
        return False
    exchanged(size, dtype, target, turns)
    return True


def _drawn(size: int, dtype: str, target: Target) -> str:
    return ask_drawn(partial(_any_turns, size), EXAMPLES, target)


def _claimed(target: Target, placement: ExpertPlacement, dtype: str, cap: str) -> None:
    plugin, provider = target.choice(asked_for(placement, target, dtype, TOP_K, HIDDEN))
    if cap not in provider.caps:
        raise NotApplicable(f"{plugin}:{provider.name} does not claim {cap}")


def cases(dtype: str) -> Iterator[Case]:
    """Every case, on one, two and four processes."""
    checks: tuple[tuple[str, Callable[[int, str, Target], str]], ...] = (
        ("round_trip", partial(_round_trip, partial(spread, 37))),
        ("one_row", partial(_round_trip, lambda size: [1] + [0] * (size - 1))),
        ("zero_rows", partial(_round_trip, lambda size: [0] * size)),
        ("largest_rows", partial(_round_trip, lambda size: [MAX_TOKENS] * size)),
        ("idle_rank", _idle_rank),
        ("experts_without_rows", _experts_without_rows),
        ("rank_without_experts", _rank_without_experts),
        ("counted_once", _counted_once),
        ("experts_moved", _moved),
        ("next_step", _next_step),
        ("deterministic", _deterministic),
        ("batch_invariant", _batch_invariant),
        ("drawn_widely", _drawn),
    )
    own = {"counted_once": "float32", "drawn_widely": "any"}
    for size in SIZES:
        for name, check in checks:
            shown = own.get(name, dtype)
            yield Case(
                id=f"{FAMILY}[{size}]/{shown}/{name}",
                family=FAMILY,
                tier="full",
                check=partial(_asked, check, size, dtype),
            )
