"""Many decode steps at once, where nothing can happen but that every running sequence gains a token.

Between an arrival and the next end of a request, planning the same rows again and again decides nothing. What does
happen is that sequences fill blocks: each takes a new one and makes the full one findable, in an order on which later
evictions depend. So these moments are gone through one by one, in the order in which single steps would have come to
them, and everything between is an addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .settle import publish_slot

if TYPE_CHECKING:
    from .planner import Planner

Array = np.ndarray[Any, Any]


class DecodeStretch:
    """Advances a planner's running sequences. ``ends`` (``[slots]``) are the lengths at which they end."""

    def __init__(self, planner: Planner, ends: Array) -> None:
        self.planner = planner
        self.ends = ends

    def first(self) -> tuple[int, int, int] | None:
        """Rows of each step, positions that the first step attends to, and the most steps; None for no stretch.

        The step in which something ends is not one of them.
        """
        planner, table = self.planner, self.planner.slots
        running = table.running
        rows = len(running)
        if not rows or rows > planner.budget or planner.prefixes.due or (len(planner.waiting) and table.num_free):
            return None
        length = table.length[running]
        if (length - table.computed[running] != 1).any() or (length <= table.prompt_len[running]).any():
            return None
        steps = int((self.ends[running] - table.committed[running]).min()) - 1
        return (rows, int(length.sum()), steps) if steps > 0 else None

    def advance(self, steps: int) -> int:
        """At most ``steps`` of the steps that :meth:`first` announced; returns how many."""
        planner, table = self.planner, self.planner.slots
        running = table.running
        length, block = table.length[running], planner.cache.block_size
        (group,) = planner.cache.groups.values()
        # Step k holds length + k tokens of a sequence: it takes a block when these no longer fit those it has, and
        # has filled one when they are a multiple of the block size.
        grow_at, grow_row = _moments(group.count[running] * block - length + 1, block, steps)
        steps = _affordable(grow_at, group.pool.num_free, steps)
        fill_at, fill_row = _moments((-length) % block, block, steps)
        done = self._go_through(running, length, (grow_at, grow_row), (fill_at, fill_row), steps)
        table.length[running] += done
        table.computed[running] += done
        table.committed[running] += done
        planner.steps += done
        table.scheduled(running, planner.steps)
        return done

    def _go_through(
        self, running: Array, length: Array, grow: tuple[Array, Array], fill: tuple[Array, Array], steps: int
    ) -> int:
        """Take and publish blocks in the order of the steps; within one, first all that take, then all that fill."""
        planner = self.planner
        at = np.concatenate([2 * grow[0], 2 * fill[0] + 1])
        row = np.concatenate([grow[1], fill[1]])
        order = np.lexsort((row, at))
        moments = zip(at[order].tolist(), row[order].tolist(), strict=True)
        slots, lengths = running.tolist(), length.tolist()
        watched, last = len(planner.waiting) > 0, -1
        for when, i in moments:
            step = when >> 1
            if step >= steps:
                break
            if watched and planner.prefixes.due and step != last:
                return last + 1  # the queue's columns are brought up to date between steps
            last = step
            if when & 1:
                publish_slot(planner, slots[i], (lengths[i] + step) // planner.cache.block_size)
            else:
                planner.cache.grow(slots[i], lengths[i] + step)
        return last + 1 if watched and planner.prefixes.due else steps


def _moments(first: Array, every: int, steps: int) -> tuple[Array, Array]:
    """Steps below ``steps`` at ``first[i] + n * every``, and the i of each."""
    counts = np.maximum(0, -((first - steps) // every))
    rows = np.repeat(np.arange(len(first)), counts)
    nth = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    return first[rows] + nth * every, rows


def _affordable(grow_at: Array, free: int, steps: int) -> int:
    """Steps until one would take a block that is not there."""
    return steps if len(grow_at) <= free else int(np.partition(grow_at, free)[free])
