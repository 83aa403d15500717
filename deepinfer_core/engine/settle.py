"""What becomes of blocks and slots after a step, the same for the engine and for the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .planner import Planner

Array = np.ndarray[Any, Any]


def publish(planner: Planner, slots: Array, computed: Array) -> None:
    """Blocks whose rows are all computed, of committed tokens, become findable."""
    table = planner.slots
    blocks = computed // planner.cache.block_size
    for i in np.nonzero((blocks > table.published[slots]) & ~table.finished[slots])[0].tolist():
        publish_slot(planner, int(slots[i]), int(blocks[i]))


def publish_slot(planner: Planner, slot: int, blocks: int) -> None:
    """The first ``blocks`` blocks of a slot are findable from now on."""
    table, cache = planner.slots, planner.cache
    sequence = table.sequence[slot]
    if sequence is None or not cache.prefix_cache:
        return
    keys, start = planner.keys(sequence), int(table.published[slot])
    cache.publish(slot, keys, start, blocks)
    planner.prefixes.published(keys[start:blocks])
    table.published[slot] = blocks


def release_finished(planner: Planner, slots: Array) -> None:
    """Sequences that ended give back slot and blocks once nothing of them is in flight."""
    table = planner.slots
    for slot in slots[table.finished[slots] & (table.in_flight[slots] == 0)].tolist():
        sequence = table.sequence[slot]
        if sequence is not None:
            planner.remove(sequence)
