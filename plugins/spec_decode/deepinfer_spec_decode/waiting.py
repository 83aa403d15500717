"""Rows that a draft module has yet to absorb: kept while nobody drafts, and absorbed when a draft may read them.

Each row's place in the caches was decided when the target ran it, and places are reused in time. The rows are a log:
those of a block are written together and in their order, or of those for one place the last alone, so that they leave
what absorbing at once would have left. Rows that nobody can read any more are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, pairwise
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

LEAST_ROWS = 8192
"""That wait before they are looked through."""

MOSTLY_ALIVE = 0.5
"""Of the rows of several steps: then those that nobody can read are not worth copying the others."""


class WaitingRows:
    """Rows of several steps, as one batch later on. ``limit``: bytes of values that are kept.

    A step's tensors are kept as they are: nothing is copied before rows are looked through or absorbed.
    """

    def __init__(self, limit: int = LIMIT, least: int = LEAST_ROWS) -> None:
        self.limit = limit
        self.least = least
        self.count = 0
        self._room = 0  # rows up to which none are looked through
        self._places: dict[str, list[Array]] = {}
        self._kept: dict[str, list[torch.Tensor]] = {}

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
            self._drop_dead(step.readable, block_sizes, self.count)
            ready += self._take(batch, np.ones(self.count, bool))
        elif drafted:
            ready += self._take(batch, self._within(step.tables, block_sizes))
        return ready

    def _within(self, tables: Mapping[str, Array], block_sizes: Mapping[str, int]) -> Array:
        """Which rows lie in these blocks, ``[R, B]``; all of a module with several groups."""
        if len(tables) != 1 or not self.count:
            return np.ones(self.count, bool)
        ((name, table),) = tables.items()
        blocks = self._all_places()[name] // block_sizes[name]
        found: Array = np.isin(blocks, table) & (blocks > 0)
        return found

    def _take(self, like: ModelBatch, wanted: Array) -> list[Absorbed]:
        """These rows, which wait no longer. ``like``: a batch of the same module, for what is not kept."""
        found = self._all_places()
        alive = _any(places > 0 for places in found.values()) if found else wanted
        wanted = wanted & alive
        if not wanted.any():
            return []
        chosen = wanted.copy()
        for places in found.values() if len(found) == 1 else ():
            chosen[wanted] = _last(places[wanted])
        kept = self._rows(chosen)
        positions = kept["positions"]
        layouts = {}
        for name, layout in like.layouts.items():
            slots = last_of_each(kept[f"slots {name}"], layout.block_size)
            # What attention would need of the rows is another step's and means nothing.
            layouts[name] = attrs.evolve(layout, positions=positions, slot_mapping=slots)
        taken = attrs.evolve(like, token_ids=kept["ids"], positions=positions, layouts=layouts)
        values = [kept[name] for name in kept if name.startswith("value")]
        if int(wanted.sum()) == int(alive.sum()):
            self._forget()
        else:  # their memory is used again when rows are looked through
            for places in found.values():
                places[wanted] = 0
        return [(taken, values)]

    def _make_room(
        self, batch: ModelBatch, values: Sequence[torch.Tensor], rows: int, readable: Callable[[str, Array], Array]
    ) -> list[Absorbed]:
        """Room for more rows: where rows are dropped, within the limit, or by absorbing all."""
        ready: list[Absorbed] = []
        if self.count + rows <= self._room:
            return ready
        most = self.limit // max(1, sum(value.shape[1:].numel() * value.element_size() for value in values))
        most_kept = most * 3 // 4 - rows  # with more, few of the next would find room
        self._drop_dead(readable, {name: layout.block_size for name, layout in batch.layouts.items()}, most_kept)
        if self.count > max(0, most_kept):
            ready = self._take(batch, np.ones(self.count, bool))
        self._room = min(most, max(self.least, 2 * (self.count + rows)))
        return ready

    def _append(
        self, batch: ModelBatch, places: Mapping[str, Array], values: Sequence[torch.Tensor], alive: Array
    ) -> None:
        if not alive.any():
            return
        self.count += int(alive.sum())
        new = {"ids": batch.token_ids, "positions": batch.positions}
        new |= {f"slots {name}": layout.slot_mapping for name, layout in batch.layouts.items()}
        new |= {f"value {i}": value for i, value in enumerate(values)}
        whole = bool(alive.all())
        chosen = None if whole else torch.from_numpy(np.nonzero(alive)[0]).to(batch.token_ids.device)
        for name, tensor in new.items():
            self._kept.setdefault(name, []).append(tensor if chosen is None else tensor[chosen])
        for name in batch.layouts:
            self._places.setdefault(name, []).append(places[name][alive])

    def _drop_dead(
        self, readable: Callable[[str, Array], Array], block_sizes: Mapping[str, int], most_kept: int
    ) -> None:
        """Forget rows that nobody can read any more: a later one has their place, or their block is free."""
        if self.count:
            found = self._all_places()
            self._keep(_any(_last(p) & readable(name, p // block_sizes[name]) for name, p in found.items()), most_kept)

    def _keep(self, mask: Array, most_kept: int) -> None:
        """Steps none of whose rows are kept go as they are. Of the others rows are copied where many of them go, or
        more than ``most_kept`` would stay; else those that go have no place any more."""
        if not mask.any():
            self._forget()
            return
        sizes = np.array([len(step) for step in self._kept["ids"]])
        steps = np.logical_or.reduceat(mask, np.cumsum(sizes) - sizes)
        rows, found = np.repeat(steps, sizes), self._all_places()
        count, alive = int(rows.sum()), int(mask.sum())
        if alive < count and (alive < MOSTLY_ALIVE * count or count > most_kept):
            self._kept, rows, count = {name: [tensor] for name, tensor in self._rows(mask).items()}, mask, alive
        else:
            self._kept = {name: list(compress(parts, steps)) for name, parts in self._kept.items()}
            for places in found.values():
                places[~mask] = 0
        self._places = {name: [places[rows]] for name, places in found.items()}
        self.count = count

    def _forget(self) -> None:
        self.count = self._room = 0
        self._places, self._kept = {}, {}

    def _all_places(self) -> dict[str, Array]:
        """Of the rows that wait, ``[count]`` by group; from now on one array each, which may be written."""
        for name, parts in self._places.items():
            if len(parts) > 1:
                self._places[name] = [np.concatenate(parts)]
        return {name: parts[0] for name, parts in self._places.items()}

    def _rows(self, mask: Array) -> dict[str, torch.Tensor]:
        """What is kept of the rows in ``mask``, some of those that wait; the others are not copied."""
        steps = self._kept["ids"]
        ends = np.cumsum([len(step) for step in steps])
        rows = np.nonzero(mask)[0]
        owners = np.searchsorted(ends, rows, side="right")
        cuts = [0, *(np.nonzero(np.diff(owners))[0] + 1).tolist(), len(rows)]
        found = []
        for start, stop in pairwise(cuts):
            owner = int(owners[start])
            first, last = int(ends[owner]) - len(steps[owner]), int(ends[owner])
            whole = stop - start == last - first
            index = None if whole else torch.from_numpy(rows[start:stop] - first).to(steps[0].device)
            found.append((owner, index))
        return {
            name: torch.cat([parts[i] if index is None else parts[i][index] for i, index in found])
            for name, parts in self._kept.items()
        }


def _any(masks: Iterable[Array]) -> Array:
    first, *others = masks
    for mask in others:
        first = first | mask
    return first


def _last(places: Array) -> Array:
    """``[T]`` which rows are the last in their place."""
    rows = np.arange(len(places))
    last = np.zeros(int(places.max(initial=0)) + 1, np.int64)
    last[places] = rows  # of equal places the last stays
    mask: Array = last[places] == rows
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
