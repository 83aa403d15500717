"""Sampling stages that need a row's best tokens, without sorting the row.

The reference sorts every row whole. Here ``topk`` finds the best few, and a row is sorted only when more of it is
needed than that or when equal logits leave the order open.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import BuildContext, LogprobsResult, SamplingBatch, SamplingRequest

REMOVED = float("-inf")
LOOKS = (256, 4096)
"""Best tokens looked at for top_p, one width after the other, before a row is sorted whole."""

LARGEST_SELECTION = 2048
"""Beyond this, selecting is no faster than sorting."""


class TopK:
    """Keeps exactly the ``top_k`` best, score descending, then id ascending; below 1 or above V is off."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference = context.reference(request)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, written in place -> the same tensor."""
        top_k = batch.state.top_k[batch.slots]
        rows = ((top_k > 0) & (top_k < logits.shape[1])).nonzero().squeeze(-1)
        if len(rows) == 0:
            return logits
        counts = top_k[rows]
        most = int(counts.max())
        if most > LARGEST_SELECTION:
            result: torch.Tensor = self._reference.run(logits, batch)
            return result
        selected = _pick(logits, rows)
        values = selected.topk(most, dim=-1).values
        keep_best(selected, counts, values.gather(1, counts[:, None] - 1))
        return _put_back(logits, rows, selected)


class TopP:
    """Keeps a token iff the probability of all better ones is below ``top_p``; the best always stays.

    Those are the row's n best for some n, found from the cumulated probabilities of the best tokens: weights in
    float32, sums in float64, compared in float32, as the reference does. A row that keeps more than the widest look
    finds goes to the reference, alone, so that no row's result depends on its neighbours.
    """

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference = context.reference(request)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, written in place -> the same tensor."""
        top_p = batch.state.top_p[batch.slots]
        rows = (top_p < 1).nonzero().squeeze(-1)
        if len(rows) == 0:
            return logits
        for width in LOOKS:
            rows = rows[self._narrow(logits, rows, top_p[rows], min(width, logits.shape[1]))]
            if len(rows) == 0:
                return logits
        alone = attrs.evolve(batch, slots=batch.slots[rows], positions=batch.positions[rows])
        logits[rows] = self._reference.run(logits[rows], alone)
        return logits

    def _narrow(self, logits: torch.Tensor, rows: torch.Tensor, top_p: torch.Tensor, width: int) -> torch.Tensor:
        """Cut the rows whose nucleus lies within their ``width`` best tokens; ``[n]`` bool says which were not."""
        selected = _pick(logits, rows)
        values = selected.topk(width, dim=-1).values
        total = (selected - values[:, :1]).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
        mass = (values - values[:, :1]).exp_().cumsum(dim=-1, dtype=torch.float64) / total
        before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        counts = (before.to(torch.float32) < top_p[:, None]).sum(dim=-1).clamp(min=1)
        wider = (counts == width) & (width < logits.shape[1])
        worst = values.gather(1, counts[:, None] - 1).masked_fill(wider[:, None], REMOVED)
        keep_best(selected, counts, worst)
        _put_back(logits, rows, selected)
        return wider


def _pick(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _put_back(logits: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    if selected is not logits:
        logits[rows] = selected
    return logits


def keep_best(logits: torch.Tensor, counts: torch.Tensor, worst: torch.Tensor) -> None:
    """Remove, in place, all but the ``counts [N]`` best of each row of ``[N, V]``.

    ``worst [N, 1]`` is the logit of the last one kept. Where others equal it, the lowest ids stay. A row whose
    worst is NaN, for the draw to refuse, or -inf keeps everything.
    """
    logits.masked_fill_(logits < worst, REMOVED)
    kept = (logits >= worst).sum(dim=-1)
    for row in ((kept > counts) & (worst[:, 0] > REMOVED)).nonzero().squeeze(-1).tolist():
        equal = (logits[row] == worst[row]).nonzero().squeeze(-1)
        better = int((logits[row] > worst[row]).sum())
        logits[row, equal[int(counts[row]) - better :]] = REMOVED


class Logprobs:
    """log-softmax in float32; ranks and order are those of the logits."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 (not changed), ``[N]`` ids, ``0 <= k`` (above V: V) -> :class:`LogprobsResult`.

        A row whose id is -1 (a failed draw) gets NaN and rank 0 as its chosen token's.
        """
        vocab_size = logits.shape[1]
        if k >= min(LARGEST_SELECTION, vocab_size):
            return self._sorted(logits, token_ids, k)
        values, top_ids = logits.topk(k + 1, dim=-1)
        if bool((~(values[:, :-1] > values[:, 1:])).any()):
            return self._sorted(logits, token_ids, k)  # equal logits, or a NaN: their order is the sort's to find
        failed = token_ids < 0
        chosen_ids = token_ids.clamp(min=0)[:, None]
        log_probs = logits.log_softmax(dim=-1)
        score = logits.gather(1, chosen_ids)
        better = (logits > score).sum(dim=-1)
        equal = (logits == score).nonzero()
        better.index_add_(0, equal[:, 0], (equal[:, 1] < chosen_ids[equal[:, 0], 0]).to(better.dtype))
        top_ids = top_ids[:, :k]
        return LogprobsResult(
            chosen=log_probs.gather(1, chosen_ids).squeeze(1).masked_fill(failed, float("nan")),
            rank=(better + 1).masked_fill(failed, 0),
            top_ids=top_ids,
            top=log_probs.gather(1, top_ids),
        )

    def _sorted(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        result: LogprobsResult = self._reference.run(logits, token_ids, k)
        return result
