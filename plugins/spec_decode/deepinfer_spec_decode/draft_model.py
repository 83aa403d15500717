"""A smaller model of the target's vocabulary drafts token by token (Leviathan et al. 2023, arXiv:2211.17192)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import DrafterContext, DraftStep, Proposal, Verified

from .calibration import calibration_for
from .records import Recorder
from .settings import Settings
from .spoken import SpokenDrafts

Array = np.ndarray[Any, Any]


class Missing:
    """Which rows of a module's caches the target ran and the module did not, by their places."""

    def __init__(self) -> None:
        self._missing: dict[str, Array] = {}

    def add(self, places: Mapping[str, Array]) -> None:
        """The target ran these rows: group -> ``[T]`` places, as in :class:`DraftStep`."""
        for name, found in places.items():
            known = self._missing.setdefault(name, np.zeros(0, bool))
            if len(found) and found.max() >= len(known):
                grown = np.zeros(2 * int(found.max()) + 1, bool)
                grown[: len(known)] = known
                self._missing[name] = known = grown
            known[found] = True

    def take(self, tables: Mapping[str, Array], anchors: Array, block_sizes: Mapping[str, int]) -> Array:
        """Rows before each anchor from the first missing one on, ``[R]``; they are missing no longer.

        What lies in the null block is not asked for: it slid out of a window.
        """
        first = anchors.copy()
        for name, table in tables.items():
            size, known = block_sizes[name], self._missing.get(name, np.zeros(0, bool))
            for row, anchor in enumerate(anchors.tolist()):
                positions = np.arange(min(anchor, table.shape[1] * size))
                places = table[row, positions // size].astype(np.int64) * size + positions % size
                there = places < len(known)
                lacks = np.nonzero(there & (places >= size) & known[np.where(there, places, 0)])[0]
                first[row] = min(first[row], lacks[0] if len(lacks) else anchor)
                known[places[there]] = False
        counts: Array = anchors - first
        return counts


class DraftModel:
    """Reads what the target read, so that its caches are shared and evicted with the target's: before it drafts for a
    request, every row of it that is not in its caches yet. Rows of requests it never drafts for it never runs."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._recorder = Recorder(settings.record_file)
        self._missing = Missing()

    def start(self, context: DrafterContext) -> None:
        self._model = context.module
        self._rule = context.rule
        self._calibration = calibration_for(context, "draft_model", self._settings)

    def absorb(self, step: DraftStep) -> None:
        assert step.rows is not None
        self._missing.add(step.places)
        if len(step.host_anchors) == 0:
            return
        sizes = {name: layout.block_size for name, layout in step.rows.layouts.items()}
        for rows in step.reread(self._missing.take(step.tables, step.host_anchors, sizes)):
            self._model.forward(rows, self._model.plan(rows))

    def propose(self, step: DraftStep) -> Proposal:
        tokens = step.state.history[step.slots, step.anchors].to(torch.int64)
        drafts = SpokenDrafts(step, self._rule)
        for j in range(step.depth):
            # A request whose draft could not be drawn has id -1: no model has a row for it, and others go on.
            batch = step.block(tokens.clamp(min=0)[:, None], j)
            tokens = drafts.draw(self._model.logits(self._model.forward(batch, self._model.plan(batch))))
        return drafts.proposal(self._calibration)

    def verified(self, results: Sequence[Verified]) -> None:
        self._recorder.add(results)
