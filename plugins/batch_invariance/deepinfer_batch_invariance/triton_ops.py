"""Operators over the kernels of :mod:`.triton_kernels`, for devices that Triton compiles for. Not run on hardware.

A backend's own operators, made for its device, come first by score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import triton

from deepinfer_core.api import (
    BuildContext,
    LinearRequest,
    LogprobsResult,
    RmsNormRequest,
    SamplingRequest,
)

from .moe import LocalExchange
from .triton_kernels import combine_kernel, gemm_kernel, log_softmax_kernel, rms_norm_kernel

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 32
"""The tile of every product, one row or thousands."""
SOFTMAX_BLOCK, COMBINE_BLOCK = 1024, 256


@attrs.frozen(eq=False)
class Weight:
    """``weight [out, in]`` and ``bias [out]`` or None, on the device, in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class FixedTileLinear:
    """``y = x @ W.T (+ bias)``."""

    def __init__(self, request: LinearRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._out_dtype: torch.dtype = getattr(torch, request.out_dtype)

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Weight:
        """Stack ``[out_i, in_features]`` parts along the output."""
        weight = torch.cat([part.to(self._device, self._dtype) for part in weights])
        expected = (self._request.out_features, self._request.in_features)
        if tuple(weight.shape) != expected:
            raise ValueError(f"linear weight has shape {tuple(weight.shape)}; the request says {expected}")
        return Weight(weight, None if bias is None else bias.to(self._device, self._dtype))

    def run(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``."""
        columns, inner = weight.weight.shape
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = torch.empty((x.shape[0], columns), dtype=self._out_dtype, device=x.device)
        programs = triton.cdiv(x.shape[0], BLOCK_M) * triton.cdiv(columns, BLOCK_N)
        if programs:
            gemm_kernel[(programs,)](
                x,
                weight.weight,
                weight.weight if weight.bias is None else weight.bias,
                y,
                x.shape[0],
                columns,
                x.stride(0),
                INNER=inner,
                HAS_BIAS=weight.bias is not None,
                PRECISION="ieee",
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_K=BLOCK_K,
            )
        return y


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


class RowLogprobs:
    """Log-probabilities; ranks and order by comparing logits, which rounds nothing."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 (not changed), ``[N]`` ids -> :class:`LogprobsResult`; -1 (a failed draw): NaN, rank 0."""
        logits = logits.contiguous()
        log_probs = torch.empty_like(logits)
        if logits.shape[0]:
            log_softmax_kernel[(logits.shape[0],)](logits, log_probs, WIDTH=logits.shape[1], BLOCK=SOFTMAX_BLOCK)
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
