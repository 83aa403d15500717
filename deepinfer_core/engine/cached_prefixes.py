"""How much of each waiting sequence the prefix cache holds, kept current while others fill the cache.

Looking up thousands of waiting sequences in every step would cost more than the step. So each is filed under the
first block it lacks; when a block of that content becomes findable, those filed under it are looked up again, a few
a step. What was evicted meanwhile shows when a sequence is about to be admitted, which looks it up anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .kv_cache import PrefixHit
from .request import Sequence
from .waiting import WaitingQueue

LOOKUPS, BLOCKS = 8, 1024
"""Most sequences and, roughly, blocks looked up again in one step."""


class CachedPrefixes:
    """Updates the queue's column ``cached``. ``look_up`` gives a sequence's prefix hit now."""

    def __init__(self, waiting: WaitingQueue, look_up: Callable[[Sequence], PrefixHit]) -> None:
        self._waiting = waiting
        self._look_up = look_up
        self._lacking: dict[bytes, dict[int, Sequence]] = {}
        self._filed: dict[int, bytes] = {}
        self._due: deque[Sequence] = deque()

    @property
    def due(self) -> bool:
        """Some are yet to be looked up again."""
        return bool(self._due)

    def watch(self, sequence: Sequence, hit: PrefixHit) -> None:
        """File a waiting sequence under the block it lacks after ``hit``."""
        self.forget(sequence)
        if sequence.request.reads_prefix_cache and hit.blocks < len(sequence.keys):
            key = sequence.keys[hit.blocks]
            self._lacking.setdefault(key, {})[sequence.number] = sequence
            self._filed[sequence.number] = key

    def forget(self, sequence: Sequence) -> None:
        """It waits no more."""
        key = self._filed.pop(sequence.number, None)
        if key is not None:
            filed = self._lacking[key]
            del filed[sequence.number]
            if not filed:
                del self._lacking[key]

    def look_again(self, sequence: Sequence) -> None:
        """Something of a waiting sequence changed, so that its hit is not known."""
        self._due.append(sequence)

    def published(self, keys: Iterable[bytes]) -> None:
        """Blocks of this content became findable."""
        if not self._lacking:
            return
        for key in keys:
            for number, sequence in self._lacking.pop(key, {}).items():
                del self._filed[number]
                self._due.append(sequence)

    def refresh(self) -> None:
        """Look up some of those for which it may have changed, in the order in which it did."""
        blocks = 0
        for _ in range(min(LOOKUPS, len(self._due))):
            sequence = self._due.popleft()
            if sequence.status != "waiting":
                continue
            hit = self._look_up(sequence)
            self._waiting.set_cached(sequence, hit.tokens)
            self.watch(sequence, hit)
            blocks += hit.blocks
            if blocks > BLOCKS:
                break
