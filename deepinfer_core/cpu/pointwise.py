"""Norms, gated activation and rotary embedding in float32, in as few passes as torch allows."""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, RmsNormRequest, RopeRequest, SwigluRequest


class RmsNorm:
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension."""

    def __init__(self, request: RmsNormRequest, context: BuildContext) -> None:
        self._root = request.hidden**0.5
        self._least = torch.tensor((request.hidden * request.eps) ** 0.5, dtype=torch.float32)
        self._zero = torch.zeros(())

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` and ``[hidden]`` float32 -> fresh memory of x's shape."""
        length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._least)  # sqrt(hidden * (mean(x^2) + eps))
        y = torch.div(x, length)
        return torch.addcmul(self._zero, y, weight, value=self._root, out=y)

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(s), s)`` with ``s = x + residual``, which overwrites ``residual``."""
        total = residual.add_(x)
        return self.run(total, weight), total


class Swiglu:
    """``silu(gate) * up``."""

    def __init__(self, request: SwigluRequest, context: BuildContext) -> None:
        self._width = request.width
        self._limit = request.limit

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` float32 (gate first) -> ``[M, width]``."""
        gate, up = gate_up[:, : self._width], gate_up[:, self._width :]
        if self._limit is not None:
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return torch.nn.functional.silu(gate).mul_(up)


class Rope:
    """Rotates channels i and i + rotary_dim / 2 of the first, or last, ``rotary_dim``; the others pass through.

    cos and sin of every position come from the reference operator, which defines them, and are laid out once so
    that a step needs two row lookups and a layer three operations: ``x * cos + swapped(x) * sin``, where
    ``swapped`` exchanges the channels of a pair and sin carries the sign of the first.
    """

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        cos, sin = context.reference(request).plan(torch.arange(request.max_positions))
        self._half = request.rotary_dim // 2
        start = request.head_dim - request.rotary_dim if request.trailing else 0
        self._parts = (start, request.rotary_dim, request.head_dim - request.rotary_dim - start)
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def plan(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> cos and signed sin, each ``[T, 1, rotary_dim]`` float32."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def run(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor], inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` float32 -> same shape; ``inverse`` turns the other way."""
        if self._parts[0] == self._parts[2] == 0:
            return self._turn(x, plan, inverse)
        before, rotary, after = torch.split(x, list(self._parts), dim=-1)
        return torch.cat((before, self._turn(rotary, plan, inverse), after), dim=-1)

    def _turn(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor], inverse: bool) -> torch.Tensor:
        cos, sin = plan
        return (x * cos).addcmul_(x.roll(self._half, -1), sin, value=-1 if inverse else 1)
