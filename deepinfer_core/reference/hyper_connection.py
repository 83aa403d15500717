"""Hyper-connections in plain torch: coefficients and sums in float32 (float64 for float64 streams)."""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, HyperConnectionRequest, HyperHeadRequest

from .dtypes import widen


@attrs.frozen
class HyperWeight:
    """``fn [rows, M*hidden]``, ``base [rows]``, ``scale [3 or 1]``, float32, on the device."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class HyperConnection:
    """Mixes M streams into a sub-layer's input and its output back into the streams."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> HyperWeight:
        """Kept in float32."""
        return packed(fn, base, scale, self._device)

    def mix(self, streams: torch.Tensor, weight: HyperWeight) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``[T, M, hidden]`` -> ``[T, hidden]``, and ``post [T, M]`` with ``C [T, M, M]``."""
        r = self._request
        m = r.streams
        wide = widen(streams)
        z = coefficients(wide, weight, r.norm_eps)
        scale, base = weight.scale.to(z.dtype), weight.base.to(z.dtype)
        pre = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + r.eps
        post = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        logits = (z[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m)
        mixed = torch.einsum("tm,tmd->td", pre, wide).to(streams.dtype)
        return mixed, (post, sinkhorn(logits, r.iterations, r.eps))

    def merge(
        self, streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """``h'_k = post_k * output + sum_j C_jk h_j``."""
        post, comb = mixed
        wide = widen(streams)
        kept = torch.einsum("tjk,tjd->tkd", comb, wide)
        return (post[:, :, None] * output.to(wide.dtype)[:, None, :] + kept).to(streams.dtype)


class HyperHead:
    """The streams' last sum."""

    def __init__(self, request: HyperHeadRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> HyperWeight:
        """Kept in float32."""
        return packed(fn, base, scale, self._device)

    def run(self, streams: torch.Tensor, weight: HyperWeight) -> torch.Tensor:
        """``[T, M, hidden]`` -> ``[T, hidden]``."""
        wide = widen(streams)
        z = coefficients(wide, weight, self._request.norm_eps)
        pre = torch.sigmoid(z * weight.scale.to(z.dtype) + weight.base.to(z.dtype)) + self._request.eps
        return torch.einsum("tm,tmd->td", pre, wide).to(streams.dtype)


def packed(fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, device: torch.device) -> HyperWeight:
    """The three tensors in float32 on the device."""
    return HyperWeight(*(t.to(device=device, dtype=torch.float32) for t in (fn, base, scale)))


def coefficients(wide: torch.Tensor, weight: HyperWeight, norm_eps: float) -> torch.Tensor:
    """``z [T, rows]``: one RMS statistic over all streams together; the norm's weight is folded into ``fn``."""
    flat = wide.flatten(1)
    return (flat @ weight.fn.to(flat.dtype).T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """``[T, M, M]`` logits -> nearly doubly stochastic; the last of the divisions is by columns."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
