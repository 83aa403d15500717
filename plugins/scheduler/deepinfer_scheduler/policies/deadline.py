"""Earliest deadline first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.api import Admit, RequestView, SystemView, TokenSplit
from deepinfer_scheduler.due import due_times, postponed
from deepinfer_scheduler.ranking import decoding, first_k
from deepinfer_scheduler.step_budget import most_tokens

from .plain import Plain


class Deadline(Plain):
    """By ``deadline_ms`` and ``ttft_target_ms`` who is next, by ``tpot_target_ms`` how large prompt chunks may be.

    What is late already goes behind what can still be met, for ``patience_s`` seconds.
    """

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        """When asked to refuse: what would be late even if it ran at once and alone."""
        if not self.settings.deadline_refuse or request.deadline is None:
            return Admit(True)
        left, need = request.deadline - view.now, self._least_seconds(request.prompt_len, view)
        if need <= left:
            return Admit(True)
        return Admit(False, f"its prompt alone takes {need:.3f} s, and its deadline is in {max(left, 0.0):.3f} s")

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        patience = self.settings.patience_s
        return first_k(postponed(view, due_times(view, patience), patience), k)

    def split(self, view: SystemView) -> TokenSplit:
        whole = view.max_batch_tokens
        rows = decoding(view.running)
        target = view.running.tpot_target[rows].min(initial=np.inf)
        if not np.isfinite(target):
            return TokenSplit(decode=whole, prefill=whole)
        most = most_tokens(view.step_cost, self.settings.latency_margin * float(target), whole)
        least = min(self.settings.latency_min_chunk, whole)
        return TokenSplit(decode=whole, prefill=least if most is None else max(least, most - int(rows.sum())))

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        """The latest deadline first, none counting as the latest; of equal ones the newest."""
        newest_first = -view.running.deadline[::-1]
        last = len(newest_first) - 1
        return [last - i for i in first_k(newest_first, len(newest_first))]

    def _least_seconds(self, prompt: int, view: SystemView) -> float:
        """Of the prompt's steps, at the best speed seen; 0 before any step."""
        if not len(view.step_cost):
            return 0.0
        tokens, seconds = view.step_cost[:, 0], view.step_cost[:, 1]
        return float(prompt * (seconds / tokens).min())
