"""Holds the time per output token by choosing how many prompt tokens a step takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_core.api import SystemView, TokenSplit
from deepinfer_scheduler.due import due_times, postponed
from deepinfer_scheduler.ranking import decoding, first_k
from deepinfer_scheduler.step_budget import most_tokens

from .plain import Plain

FIRST_CHUNK = 64
"""Prompt tokens beside decode rows before any step was measured."""


class Latency(Plain):
    """A step may take ``latency_margin`` of the tightest target of those that decode: prompts get what is left of it.

    Where decode rows alone take it all, no prompt is begun, unless one has waited for ``patience_s``. Who is next goes
    by TTFT target and deadline.
    """

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        due = due_times(view, self.settings.latency_ttft_target_ms / 1000)
        return first_k(postponed(view, due, self.settings.patience_s), k)

    def split(self, view: SystemView) -> TokenSplit:
        settings, whole = self.settings, view.max_batch_tokens
        rows = decoding(view.running)
        targets = view.running.tpot_target[rows]
        tightest = np.where(np.isfinite(targets), targets, settings.latency_tpot_target_ms / 1000).min(initial=np.inf)
        most = most_tokens(view.step_cost, settings.latency_margin * float(tightest), whole)
        room = max(whole - int(rows.sum()), 0)
        prefill = min(room, FIRST_CHUNK) if most is None else most - int(rows.sum())
        least = min(room, settings.latency_min_chunk)
        if prefill < least:
            prefill = least if self._patience_is_over(view, ~rows) else 0
        prefill = max(prefill, 0)
        return TokenSplit(decode=whole, prefill=prefill)

    def _patience_is_over(self, view: SystemView, prefilling: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> bool:
        oldest = min(view.waiting.arrival.min(initial=np.inf), view.running.arrival[prefilling].min(initial=np.inf))
        return bool(view.now - oldest >= self.settings.patience_s)
