"""Sampling stages row by row: the reference operator is given each row as a batch of one."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import BuildContext, JudgedRows, LogprobsResult, SamplingBatch, SamplingRequest


class StageByRow:
    """A stage that changes logits, or draws."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> what the reference gives for every row: fresh ``[N, V]``, or ``[N]`` token ids."""
        if logits.shape[0] == 0:
            empty: torch.Tensor = self._reference.run(logits, batch)
            return empty
        return torch.cat([self._reference.run(logits[i : i + 1], _row(batch, i)) for i in range(logits.shape[0])])


class VerifyByRow:
    """Rejection sampling of drafts, one judged row after the other."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def run(self, logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, judged: JudgedRows) -> torch.Tensor:
        """``[N, V]`` float32, ``[N]`` int64 -> fresh ``[N]`` int64."""
        result = tokens.clone()
        for number, row in enumerate(judged.rows.tolist()):
            span, own = slice(row, row + 1), slice(number, number + 1)
            scores = None if judged.scores is None else judged.scores[own]
            alone = JudgedRows(rows=torch.zeros_like(judged.rows[own]), drafts=judged.drafts[own], scores=scores)
            result[span] = self._reference.run(logits[span], _row(batch, row), tokens[span], alone)
        return result


class LogprobsByRow:
    """Log-probabilities of every row on its own."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32, ``[N]`` ids -> :class:`LogprobsResult`."""
        spans = [slice(i, i + 1) for i in range(logits.shape[0])] or [slice(0, 0)]
        rows = [self._reference.run(logits[span], token_ids[span], k) for span in spans]
        fields = [field.name for field in attrs.fields(LogprobsResult)]
        return LogprobsResult(**{name: torch.cat([getattr(row, name) for row in rows]) for name in fields})


def _row(batch: SamplingBatch, row: int) -> SamplingBatch:
    span = slice(row, row + 1)
    grammar = None if batch.grammar is None else batch.grammar[span]
    return attrs.evolve(batch, slots=batch.slots[span], positions=batch.positions[span], grammar=grammar)
