"""Blocks of one cache group: who owns them, and which can be found again by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks 1..num_blocks-1; block 0 is the null block and never handed out.

    A block with no owner is either *empty* (no identity) or *idle* (its content can still be found by hash).
    Empty blocks are handed out first, then the idle one that was released longest ago, which loses its identity.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2 are needed, one of them the null block")
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own at all."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content, owned or idle."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one owner each and no identity. The caller has checked ``num_free``."""
        assert count <= self.num_free, "planner must check num_free first"
        blocks = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._owners[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks found by :meth:`find`."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._idle[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int], *, forget: bool = False) -> None:
        """Drop one owner from each. Pass blocks in token order: later blocks become older, so that a shared
        prefix is evicted last. Null entries are skipped. ``forget``: blocks that nobody owns any more lose
        their identity."""
        for block in reversed(blocks):
            if block == 0:
                continue
            owners = self._owners[block] - 1
            assert owners >= 0, f"block {block} released twice"
            self._owners[block] = owners
            if owners == 0:
                if forget:
                    self._forget(block)
                if self._hash[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def find(self, digest: bytes) -> int | None:
        """The block with this content, or None. It may be evicted by the next ``allocate`` unless shared."""
        return self._by_hash.get(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """Make an owned block findable. A second block with the same content stays anonymous."""
        assert self._owners[block] > 0, "only an owned block can be published"
        if self._hash[block] is None and digest not in self._by_hash:
            self._hash[block] = digest
            self._by_hash[digest] = block

    def is_idle(self, block: int) -> bool:
        """True when nobody owns the block (sharing it would take it from the free ones)."""
        return self._owners[block] == 0

    def readable(self, block: int) -> bool:
        """True when somebody owns the block or can find it. The null block never is."""
        return self._owners[block] > 0 or self._hash[block] is not None

    def drop_cache(self) -> None:
        """Forget every identity. Owned blocks stay owned."""
        for block in list(self._by_hash.values()):
            self._forget(block)
        self._empty.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = None
