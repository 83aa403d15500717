"""Log-probabilities of chosen and best tokens."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, LogprobsResult, SamplingRequest


class Logprobs:
    """log-softmax in float32; ranks and order are those of the logits, so that rounding makes no new ties."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 (not changed), ``[N]`` ids, ``0 <= k`` (above V: V) -> :class:`LogprobsResult`.

        A row whose id is -1 (a failed draw) gets NaN and rank 0 as its chosen token's.
        """
        failed = token_ids < 0
        chosen_ids = token_ids.clamp(min=0)[:, None]
        log_probs = logits.log_softmax(dim=-1)
        chosen = log_probs.gather(1, chosen_ids).squeeze(1)
        score = logits.gather(1, chosen_ids)
        ids = torch.arange(logits.shape[1], device=logits.device)
        better = (logits > score) | ((logits == score) & (ids < chosen_ids))
        top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return LogprobsResult(
            chosen=chosen.masked_fill(failed, float("nan")),
            rank=(better.sum(dim=-1) + 1).masked_fill(failed, 0),
            top_ids=top_ids,
            top=log_probs.gather(1, top_ids),
        )
