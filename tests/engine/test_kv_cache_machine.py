"""KVCache against a shadow memory: what a slot can reach through its tables is always its own tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_core.api import CacheEntry, CacheGroupSpec
from deepinfer_core.engine.block_hash import domain_key, extend_keys
from deepinfer_core.engine.kv_cache import KVCache

BLOCK, SLOTS, LIMIT = 4, 4, 64
ROOT = domain_key("test")

GROUPS: list[dict[str, int | None]] = [
    {"full": None},
    {"near": 6},
    {"full": None, "near": 5},
    {"one": 1, "nine": 9},
    {"full": None, "four": 4, "wide": 40},
]


def spec(name: str, window: int | None) -> CacheGroupSpec:
    entries = (CacheEntry("t", (), "int64"),)
    return CacheGroupSpec(
        name=name, kind="full" if window is None else "window", layers=1, entries=entries, window=window
    )


class CacheMachine(RuleBasedStateMachine):
    """Requests enter with a hit, write rows, slide, publish and leave, in any order."""

    @initialize(groups=st.sampled_from(GROUPS), num_blocks=st.integers(6, 14), prefix_cache=st.booleans())
    def begin(self, groups: dict[str, int | None], num_blocks: int, prefix_cache: bool) -> None:
        self.windows = groups
        self.cache = KVCache(
            [spec(n, w) for n, w in groups.items()],
            dict.fromkeys(groups, num_blocks),
            block_size=BLOCK,
            slots=SLOTS,
            max_model_len=LIMIT,
            prefix_cache=prefix_cache,
        )
        self.memory = {name: np.full((num_blocks, BLOCK), -1) for name in groups}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.published: dict[int, int] = {}

    def keys(self, tokens: list[int]) -> list[bytes]:
        return extend_keys([], ROOT, np.array(tokens, np.int32), len(tokens), BLOCK)

    def free_slots(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.tokens]

    def write(self, slot: int, start: int, stop: int) -> None:
        """What a step does: rows of positions start..stop-1, except those a full hit leaves alone."""
        for name, group in self.cache.groups.items():
            for position in range(start, stop):
                block = int(group.table[slot, position // BLOCK])
                assert block != 0
                if position < self.cache.write_from[slot]:
                    assert self.memory[name][block, position % BLOCK] == self.tokens[slot][position]
                    continue
                assert group.pool._owners[block] == 1, "rows are written only where nobody else reads"
                self.memory[name][block, position % BLOCK] = self.tokens[slot][position]

    @precondition(lambda self: self.free_slots())
    @rule(length=st.integers(1, 30), beginning=st.integers(0, 1), ending=st.integers(0, 2), chunk=st.integers(1, 30))
    def enter(self, length: int, beginning: int, ending: int, chunk: int) -> None:
        prompt = [beginning * 100 + i for i in range(length - 1)] + [1000 + ending]
        if ending == 0:
            prompt = [beginning * 100 + i for i in range(length)]
        hit = self.cache.lookup(self.keys(prompt), length)
        assert hit.tokens <= length - 1
        assert hit.blocks * BLOCK <= length
        assert hit.tokens in (hit.blocks * BLOCK, length - 1)
        chunk = min(chunk, length - hit.tokens, self.cache.window_room(hit))
        if length + 1 > self.cache.capacity or chunk < 1 or not self.cache.room_for(hit, chunk, length + 1):
            return
        slot = self.free_slots()[0]
        self.tokens[slot] = prompt
        self.cache.start(slot, hit)
        self.cache.grow(slot, hit.tokens + chunk)
        self.published[slot] = hit.blocks
        self.computed[slot] = hit.tokens
        self.write(slot, hit.tokens, hit.tokens + chunk)
        self.computed[slot] += chunk

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), rows=st.integers(1, 9))
    def go_on(self, data: st.DataObject, rows: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        computed, known = self.computed[slot], self.tokens[slot]
        slots = np.array([slot])
        self.cache.slide(slots, np.array([computed]))
        for name, window in self.windows.items():
            passed = 0 if window is None else max(0, computed - window + 1) // BLOCK
            assert not self.cache.groups[name].table[slot, :passed].any(), "what slid out is free at once"
        if computed == len(known):
            known.append(data.draw(st.integers(500, 502)))
        rows = min(rows, len(known) - computed, LIMIT - computed, self.cache.most_tokens(slot) - computed)
        if rows < 1:
            return
        assert self.cache.can_grow(slot, computed + rows)
        self.cache.grow(slot, computed + rows)
        assert not self.cache.lacking(slots, np.array([computed + rows]))[0]
        self.write(slot, computed, computed + rows)
        self.computed[slot] += rows

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        blocks = self.computed[slot] // BLOCK
        self.cache.publish(slot, self.keys(self.tokens[slot]), self.published[slot], blocks)
        self.published[slot] = max(blocks, self.published[slot])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.release(slot)
        del self.tokens[slot], self.computed[slot], self.published[slot]

    @invariant()
    def every_visible_row_is_the_slots_own(self) -> None:
        for name, group in self.cache.groups.items():
            for slot, tokens in self.tokens.items():
                computed, window = self.computed[slot], self.windows[name]
                first = 0 if window is None else max(0, computed - window + 1)
                for position in range(first, computed):
                    block = int(group.table[slot, position // BLOCK])
                    assert self.memory[name][block, position % BLOCK] == tokens[position]

    @invariant()
    def owners_are_the_tables(self) -> None:
        for group in self.cache.groups.values():
            counts = np.bincount(group.table.ravel(), minlength=group.pool.num_blocks)
            assert counts[1:].tolist() == group.pool._owners[1:]
            assert group.pool.num_free == int((counts[1:] == 0).sum())

    @invariant()
    def held_counts_live_blocks(self) -> None:
        slots = np.arange(SLOTS)
        live = sum((group.table != 0).sum(axis=1) for group in self.cache.groups.values())
        assert self.cache.held(slots).tolist() == np.asarray(live).tolist()

    def teardown(self) -> None:
        if not hasattr(self, "tokens"):
            return
        for slot in list(self.tokens):
            self.cache.release(slot)
        for group in self.cache.groups.values():
            assert group.pool.num_free == group.pool.num_usable
            assert not group.table.any()
        assert not self.cache.write_from.any()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=30)


def test_shared_blocks_that_nobody_owns_count_as_taken() -> None:
    """Six blocks: three are another's, two idle ones are shared by the hit, so one is left and not two."""
    tokens = np.arange(16, dtype=np.int32)
    keys = extend_keys([], ROOT, tokens, 16, BLOCK)
    cache = KVCache([spec("f", None)], {"f": 7}, block_size=BLOCK, slots=2, max_model_len=LIMIT, prefix_cache=True)
    cache.grow(0, 8)
    cache.publish(0, keys, 0, 2)
    cache.release(0)
    cache.grow(1, 12)
    hit = cache.lookup(keys, 16)
    assert (hit.blocks, cache.free_blocks) == (2, 3)
    assert cache.room_for(hit, 4, 12)
    assert not cache.room_for(hit, 8, 16)


@pytest.mark.parametrize("window", range(1, 14))
@pytest.mark.parametrize("missing", range(8))
def test_window_hit_is_the_longest_that_lacks_nothing(window: int, missing: int) -> None:
    """Blocks 0..7 of a prompt are published but one; the hit is found by trying every length."""
    tokens = list(range(33))
    keys = extend_keys([], ROOT, np.array(tokens, np.int32), 33, BLOCK)
    cache = KVCache([spec("w", window)], {"w": 20}, block_size=BLOCK, slots=1, max_model_len=LIMIT, prefix_cache=True)
    pool = cache.groups["w"].pool
    blocks = pool.allocate(8)
    for number, block in enumerate(blocks):
        if number != missing:
            pool.publish(block, keys[number])
    pool.release(blocks)
    for length in range(1, 34):
        best = 0
        for count in range(length // BLOCK + 1):
            reached = min(count * BLOCK, length - 1)
            needed = {position // BLOCK for position in range(max(0, reached - window + 1), count * BLOCK)}
            if missing not in needed:
                best = count
        hit = cache.lookup(keys[: length // BLOCK], length)
        assert (hit.blocks, hit.tokens) == (best, min(best * BLOCK, max(length - 1, 0)))
