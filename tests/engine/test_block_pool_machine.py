"""BlockPool against a model that is as simple as can be: owners in a list, age in a list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer_core.engine.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Owners share, publish and release; every answer is checked."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.owners = dict.fromkeys(range(1, num_blocks), 0)
        self.identity: dict[int, bytes] = {}
        self.idle: list[int] = []  # oldest first
        self.held: list[list[int]] = []
        self.evicted = 0
        self.next_digest = 0

    def free(self) -> int:
        return sum(owners == 0 for owners in self.owners.values())

    @precondition(lambda self: self.free() > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.free()))
        anonymous = sum(o == 0 and b not in self.identity for b, o in self.owners.items())
        expected = self.idle[: max(0, count - anonymous)]
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert 0 not in blocks
        assert all(self.owners[block] == 0 for block in blocks)
        assert [b for b in blocks if b in self.identity] == expected
        for block in expected:
            assert self.pool.find(self.identity[block]) is None
            del self.identity[block]
            self.idle.remove(block)
        self.evicted += len(expected)
        for block in blocks:
            self.owners[block] = 1
        self.held.append(blocks)

    @precondition(lambda self: self.identity)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.identity)))
        assert self.pool.find(self.identity[block]) == block
        assert self.pool.is_idle(block) == (self.owners[block] == 0)
        self.pool.share([block])
        if block in self.idle:
            self.idle.remove(block)
        self.owners[block] += 1
        self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), again=st.booleans())
    def publish(self, data: st.DataObject, again: bool) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        digest = b"%d" % self.next_digest
        if again and self.identity:
            digest = data.draw(st.sampled_from(sorted(self.identity.values())))
        self.next_digest += 1
        self.pool.publish(block, digest)
        if block not in self.identity and digest not in self.identity.values():
            self.identity[block] = digest

    @precondition(lambda self: self.held)
    @rule(data=st.data(), nulls=st.integers(0, 2))
    def release(self, data: st.DataObject, nulls: int) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release([0] * nulls + blocks)
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0 and block in self.identity:
                self.idle.append(block)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        self.identity.clear()
        self.idle.clear()

    @invariant()
    def counts(self) -> None:
        assert self.pool.num_free == self.free()
        assert self.pool.num_cached == len(self.identity)
        assert self.pool.evictions == self.evicted
        assert all(self.pool.find(digest) == block for block, digest in self.identity.items())
        assert self.pool.num_usable == len(self.owners)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockPool(1)


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
