"""One process of a group, as the kit asks it: its device, its operators, and the steps it is told to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import ExpertParallelRequest, ExpertPlacement, JoinsGroups, ProcessGroup

from .case import Mismatch
from .compare import check_form, same_bits
from .memory import check_guards, guard, poisoned_allocations
from .ranks import join_host_group
from .target import Chosen, Target, open_target

Array = np.ndarray[Any, np.dtype[Any]]


@attrs.frozen(kw_only=True)
class Step:
    """A dispatch and its combine. ``x [T, hidden]`` float32, ``ids [T, top_k]``, ``weights [T, top_k]`` of one rank."""

    placement: ExpertPlacement
    x: Array
    ids: Array
    weights: Array


@attrs.frozen(kw_only=True)
class Answer:
    """What came of a step: ``rows [N, hidden]`` and ``combined [T, hidden]`` as float32, ``label``: who served."""

    label: str
    rows: Array
    weights: Array
    offsets: Array
    combined: Array


@attrs.define(kw_only=True, eq=False)
class Member:
    """This process. ``targets``: by the providers and demands that were asked for; ``built``: their operators."""

    opened: Target
    targets: dict[Any, Target] = attrs.field(factory=dict)
    built: dict[Any, Chosen] = attrs.field(factory=dict)

    def operator(
        self, request: ExpertParallelRequest, wanted: Sequence[str], demands: frozenset[str]
    ) -> tuple[Target, Chosen]:
        """A target, and the operator that it would use: built once, as the engine does."""
        kind = (tuple(wanted), demands)
        if kind not in self.targets:
            self.targets[kind] = attrs.evolve(self.opened, wanted=kind[0], demands=demands)
        asked = (*kind, repr(request))
        if asked not in self.built:
            self.built[asked] = self.targets[kind].choose(request)
        return self.targets[kind], self.built[asked]


def join(rank: int, size: int, init_method: str, timeout: float, backend: str, plugins: Sequence[str]) -> Member:
    """Open the device and meet the others: by the device's own means where it has some, else over the host."""
    target = open_target(backend, plugins)
    means: Any = target.device.join if isinstance(target.device, JoinsGroups) else join_host_group
    group: ProcessGroup = means(rank, size, init_method, timeout)
    if (group.rank, group.size) != (rank, size):
        raise Mismatch(f"join() gave rank {group.rank} of {group.size}, expected {rank} of {size}")
    target.group = group
    return Member(opened=target)


def dispatch_and_combine(
    member: Member,
    request: ExpertParallelRequest,
    wanted: Sequence[str],
    demands: frozenset[str],
    steps: Sequence[Step],
) -> list[Answer]:
    """Take the steps. Expert e multiplies a row by e + 1 and by its weight, exactly, before the dtype's rounding.

    Raises:
        Mismatch: an answer has not the form of the contract, or the operator wrote where it must not.
    """
    target, chosen = member.operator(request, wanted, demands)
    answers, results = [], []
    placement: ExpertPlacement | None = None
    placed: Any = None
    for number, step in enumerate(steps):
        label = f"moe.expert_parallel by {chosen.label}, step {number}"
        if step.placement != placement:
            placement, placed = step.placement, chosen.operator.place(step.placement)
        answer, result = _take(label, target, chosen, placed, request, step)
        answers.append(answer)
        results.append(result)
    for number, (answer, result) in enumerate(zip(answers, results, strict=True)):
        if not same_bits(target.get(result), torch.from_numpy(answer.combined)):
            raise Mismatch(
                f"moe.expert_parallel by {chosen.label}, combine: a later step changed step {number}'s sums, expected "
                "them to be the caller's own"
            )
    return answers


def _take(
    label: str, target: Target, chosen: Chosen, exchange: Any, request: ExpertParallelRequest, step: Step
) -> tuple[Answer, torch.Tensor]:
    assert target.group is not None
    dtype: torch.dtype = getattr(torch, request.dtype)
    x, ids, weights = (torch.from_numpy(value) for value in (step.x, step.ids, step.weights))

    def dispatch() -> Any:
        host = {"x": x.to(dtype), "ids": ids, "weights": weights}
        kept = {name: guard(value, target.put) for name, value in host.items()}
        return exchange.dispatch(*(one.tensor for one in kept.values())), kept

    with poisoned_allocations():
        sent, kept = target.work(dispatch)
    offsets = target.get(check_form(f"{label}, offsets", sent.offsets, (request.slots + 1,), torch.int64))
    count = int(offsets[-1])
    if offsets[0] != 0 or (offsets.diff() < 0).any():
        raise Mismatch(f"{label}, offsets: found {offsets.tolist()}, expected them to rise from 0")
    rows = target.get(check_form(f"{label}, rows", sent.rows, (count, request.hidden), dtype))
    shares = target.get(check_form(f"{label}, weights", sent.weights, (count,), torch.float32))
    experts = torch.tensor(step.placement.slots[target.group.rank]).repeat_interleave(offsets.diff())
    answers = (rows.double() * (experts + 1)[:, None] * shares[:, None]).to(dtype)
    with poisoned_allocations():
        result = target.work(lambda: exchange.combine(target.put(answers), sent.handle))
    # Not before: a process that stops half way would leave the others waiting.
    check_guards(f"{label}, dispatch", kept, frozenset(), target.get)
    combined = target.get(check_form(f"{label}, combine", result, (len(x), request.hidden), torch.float32))
    answer = Answer(
        label=chosen.label,
        rows=rows.to(torch.float32).numpy(),
        weights=shares.numpy(),
        offsets=offsets.numpy(),
        combined=combined.numpy().copy(),
    )
    return answer, result
