"""Rows that a draft module has yet to absorb: kept while nobody drafts, and absorbed together.

Each row's place in the caches was decided when the target ran it, and places are reused in time. The rows are a log:
written in their order, or of those for one place the last alone, they leave what absorbing at once would have left.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from deepinfer_core.api import ModelBatch, StepLayout

LIMIT = 512
"""Rows kept at most, but for those of one step."""


class WaitingRows:
    """Rows of several steps, as one batch later on."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.count = 0
        self._steps: list[tuple[ModelBatch, Sequence[torch.Tensor]]] = []

    def add(self, batch: ModelBatch, values: Sequence[torch.Tensor]) -> None:
        """Rows of a step. Of the batch, only token ids, positions and slot mappings are used later.

        ``values``: tensors that go with the rows, ``[T, ...]`` each; as many in every step.
        """
        if len(batch.token_ids):
            self._steps.append((batch, values))
            self.count += len(batch.token_ids)

    @property
    def full(self) -> bool:
        return self.count > self.limit

    def due(self, drafting: bool) -> tuple[ModelBatch, list[torch.Tensor]] | None:
        """What is to be absorbed now: all that waits if somebody is ``drafting`` or too much waits, else nothing."""
        return self.take() if drafting or self.full else None

    def take(self) -> tuple[ModelBatch, list[torch.Tensor]] | None:
        """All that was added, in order; None if nothing was."""
        steps, self._steps, self.count = self._steps, [], 0
        if not steps:
            return None
        if len(steps) == 1:
            return steps[0][0], list(steps[0][1])
        batches = [batch for batch, _ in steps]
        first = batches[0]
        layouts = {name: _joined([b.layouts[name] for b in batches]) for name in first.layouts}
        joined = attrs.evolve(
            first,
            token_ids=torch.cat([b.token_ids for b in batches]),
            positions=torch.cat([b.positions for b in batches]),
            layouts=layouts,
        )
        return joined, [torch.cat(parts) for parts in zip(*(values for _, values in steps), strict=True)]


def _joined(layouts: list[StepLayout]) -> StepLayout:
    """Where the rows of all go; what attention would need of them is the first's and means nothing."""
    slots = torch.cat([layout.slot_mapping for layout in layouts])
    positions = torch.cat([layout.positions for layout in layouts])
    return attrs.evolve(layouts[0], positions=positions, slot_mapping=last_of_each(slots, layouts[0].block_size))


def last_of_each(slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[T]`` places, of equal ones only the last kept; the others go to block 0, which belongs to nobody."""
    order = torch.argsort(slots, stable=True)
    placed = slots[order]
    earlier = torch.zeros_like(placed, dtype=torch.bool)
    earlier[:-1] = placed[:-1] == placed[1:]
    dropped = torch.empty_like(earlier)
    dropped[order] = earlier
    return torch.where(dropped, slots % block_size, slots)
