"""Operators over the kernels of :mod:`.triton_kernels`, for devices that Triton compiles for.

A backend's own operators, made for its device, come first by score.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from deepinfer_core.api import (
    BuildContext,
    LogprobsResult,
    RmsNormRequest,
    SamplingRequest,
)

from .moe import LocalExchange
from .triton_kernels import combine_kernel, log_softmax_kernel, rms_norm_kernel

SOFTMAX_BLOCK, SOFTMAX_WARPS = 8192, 16
"""One program reads a row of a vocabulary: much of it at a time."""
COMBINE_BLOCK = 256


class RowNorm:
    """Norm over the last dimension."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps
        self._block = triton.next_power_of_2(request.hidden)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape and dtype."""
        x = x.contiguous()
        y, rows = torch.empty_like(x), x.numel() // x.shape[-1]
        if rows:
            rms_norm_kernel[(rows,)](x, weight, y, x.shape[-1], self._eps, BLOCK=self._block)
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``."""
        total = x + residual
        return self.run(total, weight), total


def log_softmax(logits: torch.Tensor, out: torch.Tensor) -> None:
    """``[N, V]`` float32, N at least 1, both contiguous."""
    rows, width = logits.shape
    block = min(SOFTMAX_BLOCK, triton.next_power_of_2(width))
    log_softmax_kernel[(rows,)](logits, out, WIDTH=width, BLOCK=block, num_warps=SOFTMAX_WARPS)


class RowLogprobs:
    """Log-probabilities; ranks and order by comparing logits, which rounds nothing."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 (not changed), ``[N]`` ids -> :class:`LogprobsResult`; -1 (a failed draw): NaN, rank 0."""
        logits = logits.contiguous()
        log_probs = torch.empty_like(logits)
        if logits.shape[0]:
            log_softmax(logits, log_probs)
        failed, chosen = token_ids < 0, token_ids.clamp(min=0)[:, None]
        score = logits.gather(1, chosen)
        ids = torch.arange(logits.shape[1], device=logits.device)
        better = (logits > score) | ((logits == score) & (ids < chosen))
        top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return LogprobsResult(
            chosen=log_probs.gather(1, chosen)[:, 0].masked_fill(failed, float("nan")),
            rank=(better.sum(dim=-1) + 1).masked_fill(failed, 0),
            top_ids=top_ids,
            top=log_probs.gather(1, top_ids),
        )


class OrderedExchange(LocalExchange):
    """Every expert is in this process; one kernel adds up, in order of expert id."""

    def combine(self, outputs: torch.Tensor, handle: Any) -> torch.Tensor:
        """``[N, hidden]`` as dispatched -> ``[T, hidden]`` float32."""
        outputs, hidden = outputs.contiguous(), outputs.shape[1]
        y = torch.empty((handle.tokens, hidden), dtype=torch.float32, device=outputs.device)
        if y.numel():
            grid = (handle.tokens, triton.cdiv(hidden, COMBINE_BLOCK))
            combine_kernel[grid](outputs, handle.places, y, hidden, TOP_K=self._request.top_k, BLOCK=COMBINE_BLOCK)
        return y
