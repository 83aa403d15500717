"""The paged cache of all groups: block tables by slot, growth, sliding windows, and prefix hits.

Every cache group has its own pool and block tables, under one block numbering: block number b of a request
covers tokens ``b * block_size`` to ``(b+1) * block_size - 1`` in each group. A window group frees the
blocks that slid out of its window and keeps 0, the null block, in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import CacheGroupSpec

from .block_pool import BlockPool

Array = np.ndarray[Any, Any]
IntArray = np.ndarray[Any, np.dtype[np.int32]]


@attrs.define(kw_only=True)
class PrefixHit:
    """What the prefix cache holds of a request.

    Attributes:
        tokens: tokens that need not be computed (at most the request's length - 1).
        blocks: block numbers covered, the last one perhaps past ``tokens`` (a full hit).
        found: per group, the blocks of numbers ``0..blocks-1``; 0 where a window group needs none.
    """

    tokens: int
    blocks: int
    found: dict[str, list[int]]


class GroupTable:
    """Blocks of one group, by slot: ``table[slot, first[slot]:count[slot]]`` are the slot's live blocks.

    ``first``, ``count``: ``[slots]`` zeros that are this group's from now on.
    """

    def __init__(
        self, spec: CacheGroupSpec, num_blocks: int, max_blocks: int, first: IntArray, count: IntArray
    ) -> None:
        self.spec = spec
        self.pool = BlockPool(num_blocks)
        self.table: IntArray = np.zeros((len(first), max_blocks), np.int32)
        self.first, self.count = first, count

    def append(self, slot: int, blocks: Sequence[int]) -> None:
        start = int(self.count[slot])
        self.table[slot, start : start + len(blocks)] = blocks
        self.count[slot] = start + len(blocks)

    def release(self, slot: int) -> None:
        first, count = int(self.first[slot]), int(self.count[slot])
        self.pool.release(self.table[slot, first:count].tolist())
        self.table[slot, :count] = 0
        self.count[slot] = self.first[slot] = 0

    def cut(self, slot: int, count: int) -> None:
        have = int(self.count[slot])
        if count < have:
            self.pool.release(self.table[slot, count:have].tolist())
            self.table[slot, count:have] = 0
            self.count[slot] = count

    def slide_to(self, slot: int, first_needed: int, *, forget: bool) -> None:
        first = int(self.first[slot])
        if first_needed > first:
            self.pool.release(self.table[slot, first:first_needed].tolist(), forget=forget)
            self.table[slot, first:first_needed] = 0
            self.first[slot] = first_needed


class KVCache:
    """All groups of one engine. ``num_blocks`` is per group, null block included."""

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        num_blocks: Mapping[str, int],
        *,
        block_size: int,
        slots: int,
        max_model_len: int,
        prefix_cache: bool,
        retain_windows: bool = True,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prefix_cache = prefix_cache
        self.retain_windows = retain_windows
        max_blocks = -(-max_model_len // block_size)
        ordered = sorted(groups, key=lambda group: group.window is None)
        self._first, self._count = np.zeros((2, len(ordered), slots), np.int32)  # of all groups, windows first
        tables = {
            group.name: GroupTable(group, num_blocks[group.name], max_blocks, self._first[i], self._count[i])
            for i, group in enumerate(ordered)
        }
        self.groups = {group.name: tables[group.name] for group in groups}
        self._windows = [tables[group.name] for group in ordered if group.window is not None]
        self._spans = np.array([group.window for group in ordered if group.window is not None], np.int64)
        self.write_from: np.ndarray[Any, Any] = np.zeros(slots, np.int64)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def slides(self) -> bool:
        """True when :meth:`slide` has something to free now and then."""
        return bool(self._windows)

    @property
    def capacity(self) -> int:
        """Tokens the longest possible request can hold when it is alone."""
        usable = [g.pool.num_usable for g in self.groups.values() if g.spec.window is None]
        return min(usable, default=2**31) * self.block_size

    @property
    def window_capacity(self) -> int:
        """Tokens that the window groups could hold of one request at a time, however long it is."""
        return min((g.pool.num_usable for g in self._windows), default=2**31) * self.block_size

    @property
    def free_blocks(self) -> int:
        return min((g.pool.num_free for g in self.groups.values()), default=2**31)

    @property
    def total_blocks(self) -> int:
        return min((g.pool.num_usable for g in self.groups.values()), default=2**31)

    def lookup(self, keys: Sequence[bytes], length: int) -> PrefixHit:
        """The longest prefix of a request of ``length`` tokens that every group can serve.

        At least one token is left to compute. When all blocks of an exact multiple are found, that token is
        recomputed with its cache row left alone (see ``write_from``).
        """
        if not self.prefix_cache or not keys:
            return PrefixHit(tokens=0, blocks=0, found={})
        limit = min(len(keys), length // self.block_size)
        blocks = limit
        for group in self.groups.values():
            if group.spec.window is None:
                found = 0
                while found < blocks and group.pool.find(keys[found]) is not None:
                    found += 1
                blocks = found
        before = -1
        while blocks != before:  # a shorter prefix has another last window, in every group
            before = blocks
            for group in self._windows:
                blocks = self._window_prefix(group, keys, blocks, length)
        tokens = min(blocks * self.block_size, length - 1)
        return PrefixHit(
            tokens=tokens,
            blocks=blocks,
            found={n: self._found(g, keys, blocks, tokens) for n, g in self.groups.items()},
        )

    def _first_needed(self, group: GroupTable, tokens: int) -> int:
        """First block number that a query at position ``tokens`` can still see."""
        window = group.spec.window
        return 0 if window is None else max(0, tokens - window + 1) // self.block_size

    def _window_prefix(self, group: GroupTable, keys: Sequence[bytes], blocks: int, length: int) -> int:
        """Largest b <= blocks whose last window is wholly found."""
        run_start = blocks  # blocks run_start..b-1 are known to be found
        b = blocks
        while b > 0:
            need = self._first_needed(group, min(b * self.block_size, length - 1))
            run_start = min(run_start, b)
            while run_start > need and group.pool.find(keys[run_start - 1]) is not None:
                run_start -= 1
            if run_start <= need:
                return b
            b = run_start - 1  # block run_start-1 is missing: no window may contain it
            run_start = b
        return 0

    def _found(self, group: GroupTable, keys: Sequence[bytes], blocks: int, tokens: int) -> list[int]:
        first = self._first_needed(group, tokens)
        found = [0] * min(first, blocks)
        for key in keys[first:blocks]:
            block = group.pool.find(key)
            assert block is not None
            found.append(block)
        return found

    def room_for(self, hit: PrefixHit, chunk: int, tokens: int) -> bool:
        """True when a new request with this hit could run ``chunk`` rows now and grow to ``tokens`` tokens
        without preempting anyone. Window groups only ever need the chunk and what lies before it."""
        for name, group in self.groups.items():
            found = hit.found.get(name, [])
            wanted = self.blocks_for(tokens if group.spec.window is None else hit.tokens + chunk)
            idle = sum(1 for block in found if block and group.pool.is_idle(block))
            if max(wanted - len(found), 0) + idle > group.pool.num_free:
                return False
        return True

    def window_room(self, hit: PrefixHit) -> int:
        """Most rows that a new request with this hit could run now, as far as the window groups go."""
        room = 2**31
        for group in self._windows:
            found = hit.found.get(group.spec.name, [])
            idle = sum(1 for block in found if block and group.pool.is_idle(block))
            room = min(room, (len(found) + group.pool.num_free - idle) * self.block_size - hit.tokens)
        return room

    def start(self, slot: int, hit: PrefixHit) -> None:
        """Give a slot its shared prefix. Blocks found by the hit must not have been evicted since."""
        for name, group in self.groups.items():
            found = hit.found.get(name, [])
            group.pool.share(block for block in found if block)
            group.append(slot, found)
            group.first[slot] = next((i for i, block in enumerate(found) if block), len(found))
        full_hit = hit.blocks * self.block_size > hit.tokens
        self.write_from[slot] = hit.blocks * self.block_size if full_hit else 0

    def missing_blocks(self, slot: int, tokens: int) -> int:
        """Most blocks that any one group lacks to hold ``tokens`` tokens of a slot."""
        wanted = self.blocks_for(tokens)
        return max((wanted - int(g.count[slot]) for g in self.groups.values()), default=0)

    def lacking(self, slots: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Mask of the slots whose tables must grow to hold ``tokens`` (same shape as ``slots``)."""
        lacks = -(-tokens // self.block_size) > self._count[:, slots]
        mask: Array = np.logical_or.reduce(lacks, axis=0)
        return mask

    def most_tokens(self, slot: int) -> int:
        """Tokens a slot could hold if it got every free block."""
        held = (int(g.count[slot]) + g.pool.num_free for g in self.groups.values())
        return min(held, default=2**31) * self.block_size

    def can_grow(self, slot: int, tokens: int) -> bool:
        """True when the free blocks suffice for :meth:`grow`."""
        wanted = self.blocks_for(tokens)
        return all(wanted - int(g.count[slot]) <= g.pool.num_free for g in self.groups.values())

    def grow(self, slot: int, tokens: int) -> None:
        """Own blocks for ``tokens`` tokens in every group. The caller has checked :meth:`can_grow`."""
        wanted = self.blocks_for(tokens)
        for group in self.groups.values():
            count = wanted - int(group.count[slot])
            if count > 0:
                group.append(slot, group.pool.allocate(count))

    def slide(self, slots: np.ndarray[Any, Any], computed: np.ndarray[Any, Any]) -> None:
        """Free window blocks that no query at or after position ``computed`` can see.

        Unless ``retain_windows`` they can no longer be found by content either, so that a prefix can be continued
        only from where a request stopped.
        """
        needed = np.maximum(computed - self._spans[:, None] + 1, 0) // self.block_size
        for g, i in zip(*np.nonzero(needed > self._first[: len(needed), slots]), strict=True):
            self._windows[g].slide_to(int(slots[i]), int(needed[g, i]), forget=not self.retain_windows)

    def shrink(self, slot: int, tokens: int) -> None:
        """Give back the blocks past the first ``tokens`` tokens: rejected drafts filled them."""
        for group in self.groups.values():
            group.cut(slot, self.blocks_for(tokens))

    def publish(self, slot: int, keys: Sequence[bytes], start: int, stop: int) -> None:
        """Make blocks ``start..stop-1`` of a slot findable. Their rows must have been computed and committed."""
        if not self.prefix_cache:
            return
        for group in self.groups.values():
            for number in range(max(start, int(group.first[slot])), min(stop, int(group.count[slot]))):
                group.pool.publish(int(group.table[slot, number]), keys[number])

    def release(self, slot: int) -> None:
        """Give back every block of a slot. Published ones stay findable until they are needed."""
        for group in self.groups.values():
            group.release(slot)
        self.write_from[slot] = 0

    def readable(self, group: str, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``[N]`` blocks of a group -> whether anybody owns or can find them."""
        pool = self.groups[group].pool
        asked = np.zeros(int(blocks.max(initial=0)) + 1, bool)
        asked[blocks] = True
        for block in np.nonzero(asked)[0].tolist():
            asked[block] = pool.readable(block)
        found: Array = asked[blocks]
        return found

    def places(self, group: str, table: Array, requests: Array, positions: Array, next_positions: Array) -> Array:
        """Where rows lie in a group: ``[T]`` int64, block times block size plus offset.

        Args:
            table: ``[R, B]`` blocks. requests, positions: ``[T]`` of the rows.
            next_positions: ``[R]``, the first that may run next. A row that none from there on can see, in a block
                that nobody will find as a prefix either, is said to lie in the null block.
        """
        numbers, spec = positions // self.block_size, self.groups[group].spec
        blocks = table[requests, numbers].astype(np.int64)
        if spec.window is not None and not self.prefix_cache:
            first = np.maximum(next_positions - spec.window + 1, 0) // self.block_size
            blocks[numbers < first[requests]] = 0
        found: Array = blocks * self.block_size + positions % self.block_size
        return found

    def held(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Blocks held by each slot, over all groups."""
        total = np.zeros(len(slots), np.int64)
        for group in self.groups.values():
            total += group.count[slots] - group.first[slots]
        return total
