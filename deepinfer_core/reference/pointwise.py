"""Norm, gated activation and embedding lookup."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, EmbeddingRequest, RmsNormRequest, SwigluRequest

from .dtypes import dtype_named, widen


class RmsNorm:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension, rounded once, at the end."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` and ``[hidden]`` -> same shape and dtype as x."""
        wide = widen(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(mean_square + self._eps)
        return (normed * weight.to(wide.dtype)).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual`` in x's dtype; both inputs are left alone."""
        total = x + residual
        return self.run(total, weight), total


class Swiglu:
    """``silu(gate) * up``, rounded once, at the end."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._limit = request.limit

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` (gate first) -> ``[M, width]``, same dtype."""
        gate, up = widen(gate_up).chunk(2, dim=-1)
        if self._limit is not None:
            gate = gate.clamp(max=self._limit)
            up = up.clamp(min=-self._limit, max=self._limit)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


class Embedding:
    """Row lookup."""

    def __init__(self, request: EmbeddingRequest, context: BuildContext) -> None:
        self._dtype = dtype_named(request.dtype)
        self._device = context.device

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        """``[vocab_size, hidden]`` on the device in the request's dtype; used as it is if it already is that."""
        return weight.to(device=self._device, dtype=self._dtype)

    def run(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 in ``[0, vocab_size)`` -> ``[T, hidden]``."""
        return torch.nn.functional.embedding(token_ids, weight)
