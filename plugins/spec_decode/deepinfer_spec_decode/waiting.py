"""Rows that a draft module has yet to absorb: kept while nobody drafts, and absorbed when a draft may read them.

Each row's place in the caches was decided when the target ran it, and places are reused in time. The rows are a log:
those of a block are written together and in their order, or of those for one place the last alone, so that they leave
what absorbing at once would have left. Rows that nobody can read any more are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import DraftStep, ModelBatch

Array = np.ndarray[Any, Any]
Absorbed = tuple[ModelBatch, list[torch.Tensor]]
"""Rows as one batch, of which token ids, positions and slot mappings may be used, and the values that go with them."""

LIMIT = 64 * 2**20
"""Bytes of values kept at most, but for those of one step."""

LEAST_ROWS = 512
"""That there is room for before rows are looked through."""


class WaitingRows:
    """Rows of several steps, as one batch later on. ``limit``: bytes of values that are kept."""

    def __init__(self, limit: int = LIMIT, least: int = LEAST_ROWS) -> None:
        self.limit = limit
        self.least = least
        self.count = 0
        self._room = 0
        self._places: dict[str, Array] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def due(self, step: DraftStep, batch: ModelBatch, values: Sequence[torch.Tensor]) -> list[Absorbed]:
        """Take a step's rows, and give what is to be absorbed now, in this order.

        Drafting for most requests of a step, all that waits; for a few, their rows; for nobody, nothing, unless too
        much waits.

        Args:
            batch: ``step.rows``, perhaps with other token ids. values: tensors that go with the rows, ``[T, ...]``
                each; as many in every step.
        """
        drafted, requests = len(step.host_anchors), len(next(iter(batch.layouts.values())).host_query_lens)
        few = 2 * drafted < requests
        if self.count == 0 and drafted and not few:
            return [(batch, list(values))]
        block_sizes = {name: layout.block_size for name, layout in batch.layouts.items()}
        alive = _any(step.places[name] >= size for name, size in block_sizes.items())
        ready = self._make_room(batch, values, int(alive.sum()), step.readable)
        self._append(batch, step.places, values, alive)
        if drafted and not few:
            self._drop_dead(step.readable, block_sizes)
            ready += self._take(batch, np.ones(self.count, bool))
        elif drafted:
            ready += self._take(batch, self._within(step.tables, block_sizes))
        return ready

    def _within(self, tables: Mapping[str, Array], block_sizes: Mapping[str, int]) -> Array:
        """Which rows lie in these blocks, ``[R, B]``; all of a module with several groups."""
        if len(tables) != 1:
            return np.ones(self.count, bool)
        ((name, table),) = tables.items()
        blocks = self._places[name][: self.count] // block_sizes[name]
        found: Array = np.isin(blocks, table) & (blocks > 0)
        return found

    def _take(self, like: ModelBatch, wanted: Array) -> list[Absorbed]:
        """These rows, which wait no longer. ``like``: a batch of the same module, for what is not kept."""
        if not wanted.any():
            return []
        chosen = wanted.copy()
        for places in self._places.values() if len(self._places) == 1 else ():
            chosen[wanted] = _last(places[: self.count][wanted])
        kept, rows = self._kept, self._rows(chosen)
        positions = kept["positions"][rows]
        layouts = {}
        for name, layout in like.layouts.items():
            slots = last_of_each(kept[f"slots {name}"][rows], layout.block_size)
            # What attention would need of the rows is another step's and means nothing.
            layouts[name] = attrs.evolve(layout, positions=positions, slot_mapping=slots)
        taken = attrs.evolve(like, token_ids=kept["ids"][rows], positions=positions, layouts=layouts)
        values = [kept[name][rows] for name in kept if name.startswith("value")]
        if wanted.all():
            self.count = 0
        else:  # their memory is used again when room is made
            for places in self._places.values():
                places[: self.count][wanted] = 0
        return [(taken, values)]

    def _make_room(
        self, batch: ModelBatch, values: Sequence[torch.Tensor], rows: int, readable: Callable[[str, Array], Array]
    ) -> list[Absorbed]:
        """Room for more rows: in what there is, where rows were dropped, in more memory, or by absorbing all."""
        ready: list[Absorbed] = []
        if self.count + rows <= self._room:
            return ready
        self._drop_dead(readable, {name: layout.block_size for name, layout in batch.layouts.items()})
        most = self.limit // max(1, sum(value[:1].numel() * value.element_size() for value in values))
        if self.count and self.count + rows > most * 3 // 4:  # few of the next would find room
            ready = self._take(batch, np.ones(self.count, bool))
        wanted = self.count + rows
        self._room = max(wanted, self._room, min(most, max(self.least, 2 * wanted)))
        return ready

    def _append(
        self, batch: ModelBatch, places: Mapping[str, Array], values: Sequence[torch.Tensor], alive: Array
    ) -> None:
        start, self.count = self.count, self.count + int(alive.sum())
        new = {"ids": batch.token_ids, "positions": batch.positions}
        new |= {f"slots {name}": layout.slot_mapping for name, layout in batch.layouts.items()}
        new |= {f"value {i}": value for i, value in enumerate(values)}
        chosen = None if alive.all() else torch.from_numpy(np.nonzero(alive)[0]).to(batch.token_ids.device)
        for name, tensor in new.items():
            kept = self._kept.get(name)
            if kept is None or len(kept) < self.count:
                grown = tensor.new_empty((self._room, *tensor.shape[1:]))
                if kept is not None:
                    grown[:start] = kept[:start]
                self._kept[name] = kept = grown
            kept[start : self.count] = tensor if chosen is None else tensor[chosen]
        for name in batch.layouts:
            known = self._places.get(name, np.zeros(0, np.int64))
            if len(known) < self.count:
                known = np.concatenate([known[:start], np.zeros(self._room - start, np.int64)])
            known[start : self.count] = places[name][alive]
            self._places[name] = known

    def _drop_dead(self, readable: Callable[[str, Array], Array], block_sizes: Mapping[str, int]) -> None:
        """Forget rows that nobody can read any more: a later one has their place, or their block is free."""
        if self.count:
            found = {name: places[: self.count] for name, places in self._places.items()}
            self._keep(_any(_last(p) & readable(name, p // block_sizes[name]) for name, p in found.items()))

    def _keep(self, mask: Array) -> None:
        before, self.count = self.count, int(mask.sum())
        if 0 < self.count < before:
            rows = self._rows(mask)
            for tensor in self._kept.values():
                tensor[: self.count] = tensor[rows]
            for places in self._places.values():
                places[: self.count] = places[:before][mask]

    def _rows(self, mask: Array) -> torch.Tensor:
        return torch.from_numpy(np.nonzero(mask)[0]).to(self._kept["ids"].device)


def _any(masks: Iterable[Array]) -> Array:
    found: Array = np.logical_or.reduce(list(masks))
    return found


def _last(places: Array) -> Array:
    """``[T]`` which rows are the last in their place."""
    mask = np.zeros(len(places), bool)
    mask[len(places) - 1 - np.unique(places[::-1], return_index=True)[1]] = True
    return mask


def last_of_each(slots: torch.Tensor, block_size: int) -> torch.Tensor:
    """``[T]`` places, of equal ones only the last kept; the others go to block 0, which belongs to nobody."""
    order = torch.argsort(slots, stable=True)
    placed = slots[order]
    earlier = torch.zeros_like(placed, dtype=torch.bool)
    earlier[:-1] = placed[:-1] == placed[1:]
    dropped = torch.empty_like(earlier)
    dropped[order] = earlier
    return torch.where(dropped, slots % block_size, slots)
