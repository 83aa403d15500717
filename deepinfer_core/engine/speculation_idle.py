"""Steps that draft for nobody: shown to the drafter several as one, and measured now and then.

Each by itself would meet cold caches, on the host, and make it wait, on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch

from .speculation_rows import TargetRows
from .step_inputs import StepInputs

Array = np.ndarray[Any, Any]

IDLE_STEPS, IDLE_ROWS = 32, 4096
"""Steps, and their rows, that a drafter is shown together. More would be objects enough for the garbage collector to
begin, which a steady engine never makes it do; a full collection takes 0.1 s."""

MEASURED_EACH = 4
"""Steps of which one is measured."""


@attrs.frozen(kw_only=True)
class IdleRows:
    """Rows ``[T]`` that the target ran while nobody was drafted for; ``token_ids`` None where a graph ran."""

    inputs: StepInputs
    token_ids: torch.Tensor | None
    taps: Sequence[torch.Tensor]


class IdleSteps:
    """Those that the drafter has not seen yet, and how many were not measured."""

    def __init__(self) -> None:
        self._unseen: list[IdleRows] = []
        self._rows = 0
        self._unmeasured = 0

    def add(self, ran: TargetRows) -> bool:
        """A step without drafts ran. True when the drafter shall see what there is."""
        tokens = None if ran.batch is None else ran.batch.token_ids
        self._unseen.append(IdleRows(inputs=ran.inputs, token_ids=tokens, taps=ran.taps))
        self._rows += len(ran.inputs.positions)
        return len(self._unseen) >= IDLE_STEPS or self._rows >= IDLE_ROWS

    def take(self) -> list[IdleRows]:
        """Those not seen, in their order; from now on they are."""
        unseen, self._unseen, self._rows = self._unseen, [], 0
        return unseen

    @property
    def measures(self) -> Literal["step", "end", "nothing"]:
        """Whether a step without drafts is measured. The end of the one before it must be waited for, on a device
        that works behind the host's back."""
        left = MEASURED_EACH - self._unmeasured
        return "step" if left <= 1 else "end" if left == 2 else "nothing"

    def ran(self) -> None:
        """Another step, with or without drafts."""
        self._unmeasured += 1

    def measured(self) -> int:
        """How many steps the measured one stands for, itself included."""
        count, self._unmeasured = self._unmeasured, 0
        return count


def joined(ran: Sequence[IdleRows], groups: Iterable[str]) -> IdleRows:
    """Rows of several steps as those of one, whose requests are those of each step in turn, with tables of these cache
    groups. Nothing of it is sampled."""
    if len(ran) == 1:
        return ran[0]
    tokens = [rows.token_ids for rows in ran if rows.token_ids is not None]
    return IdleRows(
        inputs=_inputs([rows.inputs for rows in ran], groups),
        token_ids=torch.cat(tokens) if len(tokens) == len(ran) else None,
        taps=[torch.cat(parts) for parts in zip(*(rows.taps for rows in ran), strict=True)],
    )


def _inputs(steps: Sequence[StepInputs], groups: Iterable[str]) -> StepInputs:
    requests = np.array([len(step.counts) for step in steps])
    before = np.repeat(np.cumsum(requests) - requests, [len(step.positions) for step in steps])
    counts = np.concatenate([step.counts for step in steps])
    none = np.zeros(0, np.int64)
    return StepInputs(
        row_requests=np.concatenate([step.row_requests for step in steps]) + before,
        row_slots=np.concatenate([step.row_slots for step in steps]),
        positions=np.concatenate([step.positions for step in steps]),
        cu_seqlens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=np.concatenate([step.seq_lens for step in steps]),
        counts=counts,
        tables={name: _stacked([step.tables[name] for step in steps]) for name in groups},
        redirect_below=_redirects(steps),
        sample_rows=none,
        sample_slots=none,
        sample_positions=none,
        drafts=None,
        entering=[],
        prompts=[],
    )


def _redirects(steps: Sequence[StepInputs]) -> Array | None:
    if all(step.redirect_below is None for step in steps):
        return None
    return np.concatenate(
        [np.zeros(len(s.counts), np.int64) if s.redirect_below is None else s.redirect_below for s in steps]
    )


def _stacked(tables: Sequence[Array]) -> Array:
    """``[R, B]`` each, as wide as the widest."""
    width = max(table.shape[1] for table in tables)
    whole = np.zeros((sum(map(len, tables)), width), np.int32)
    start = 0
    for table in tables:
        whole[start : start + len(table), : table.shape[1]] = table
        start += len(table)
    return whole
