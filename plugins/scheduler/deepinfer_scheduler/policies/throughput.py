"""Many decode rows for little prompt work, and no more requests than the cache can carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.api import SystemView, TokenSplit
from deepinfer_scheduler.ranking import decoding, first_k, patient_first_k

from .plain import Plain


class Throughput(Plain):
    """Steps cost less per token the more rows they have, and a preemption pays for its prompt twice.

    So: prompts first that bring the most output for the least that is not cached; nothing new while the free blocks
    are below the reserve that running requests grow into; and who must go is whoever has the least to recompute.
    """

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        waiting = view.waiting
        work = (waiting.prompt + waiting.output - waiting.cached) / np.maximum(waiting.max_tokens - waiting.output, 1)
        return patient_first_k(view, work, k, self.settings.patience_s)

    def split(self, view: SystemView) -> TokenSplit:
        whole = view.max_batch_tokens
        full = view.free_blocks < self.settings.throughput_reserve * view.total_blocks
        if full and decoding(view.running).all():
            return TokenSplit(decode=whole, prefill=0)
        return TokenSplit(decode=whole, prefill=whole)

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        newest_first = view.running.computed[::-1]
        last = len(newest_first) - 1
        return [last - i for i in first_k(newest_first, len(newest_first))]
