"""Norm, gated activation and rotary embedding on the host in float32.

Sums go row by row. Products, sums and roots of single elements are correctly rounded wherever an element lies. What
remains is the exponential, which torch computes in vectors but for the last few elements of a stretch of memory: here
every row is a stretch of its own.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, RmsNormRequest, RopeRequest, SwigluRequest

from .self_check import random_row, require_steady, threads

STRETCH = 1 << 15
"""Elements up to which torch does not divide a pointwise operation among threads, which would cut rows anywhere."""


class RmsNorm:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._eps = request.eps
        self._per_channel = 1.0 / request.hidden
        weight, row = random_row(request.hidden), random_row(request.hidden)
        with threads(context.num_threads):
            require_steady(lambda x: self.run(x, weight), row, f"norm of {request.hidden} channels")

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` and ``[hidden]`` float32 -> fresh memory of x's shape."""
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().mul_(self._per_channel).add_(self._eps).rsqrt_()
        return (x * scale).mul_(weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``, which overwrites ``residual``."""
        total = residual.add_(x)
        return self.run(total, weight), total


class Swiglu:
    """``silu(gate) * up``."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._width = request.width
        self._limit = request.limit
        self._rows = max(1, STRETCH // request.width)
        with threads(context.num_threads):
            require_steady(self.run, random_row(2 * request.width), f"swiglu of {request.width} channels")

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` float32 (gate first) -> ``[M, width]``."""
        if gate_up.shape[0] <= self._rows:
            return self._gated(gate_up)
        return torch.cat([self._gated(part) for part in torch.split(gate_up, self._rows)])

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        # Seen as halves of rows, neither half is one stretch of memory.
        gate, up = gate_up[:, : self._width], gate_up[:, self._width :]
        if self._limit is not None:
            halves = torch.empty_like(gate_up)
            torch.clamp(gate, max=self._limit, out=halves[:, : self._width])
            torch.clamp(up, -self._limit, self._limit, out=halves[:, self._width :])
            gate, up = halves[:, : self._width], halves[:, self._width :]
        return torch.nn.functional.silu(gate).mul_(up)


class Rope:
    """Rotates pairs of the first, or last, ``rotary_dim`` channels; the others pass through.

    cos and sin of every position come from the reference operator, which defines them. Every product and every sum is
    an operation of its own, so that none is fused for some elements only.
    """

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        cos, sin = context.reference(request).plan(torch.arange(request.max_positions))
        self._interleaved = request.interleaved
        self._start = request.head_dim - request.rotary_dim if request.trailing else 0
        self._end = self._start + request.rotary_dim
        self._half = request.rotary_dim // 2
        if request.interleaved:
            self._cos, self._sin = cos, sin
        else:
            self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def plan(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> the positions' cos and sin, as ``run`` needs them."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def run(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor], inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` float32 -> same shape; ``inverse`` turns the other way."""
        cos, sin = plan
        if inverse:
            sin = -sin
        if not self._interleaved and self._end - self._start == x.shape[-1]:
            return (x * cos).add_(x.roll(self._half, -1).mul_(sin))
        y = x.clone(memory_format=torch.contiguous_format)
        source, target = x[..., self._start : self._end], y[..., self._start : self._end]
        if self._interleaved:
            first, second = source[..., 0::2], source[..., 1::2]
            target[..., 0::2] = (first * cos).sub_(second * sin)
            target[..., 1::2] = (second * cos).add_(first * sin)
        else:
            target.copy_((source * cos).add_(source.roll(self._half, -1).mul_(sin)))
        return y
