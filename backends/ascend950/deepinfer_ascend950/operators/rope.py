"""``pointwise.rope`` by ``npu_rotary_mul``.

Relied on (document ``npu_rotary_mul``): with x split into halves (mode ``half``) or neighbours (``interleave``),
``out = r1 * x + r2 * (-x2, x1)``. In layout BSND, ``[1, T, heads, d]``, r1 and r2 are ``[1, T, 1, d]``, within [-1, 1];
``d`` is even and below 896; B and N are below 1000; ``interleave`` also wants B * N below 1000. r1 is cos and r2 sin,
repeated as the mode pairs channels.

Angles follow the request's scaling as the reference computes them: cos and sin are what the reference makes of the
unit vectors, so that no formula stands here twice.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, RopeRequest


@attrs.frozen(eq=False)
class _Tables:
    """``cos`` and ``sin`` ``[1, T, 1, rotary_dim]`` in the dtype of x, and in float32 for the way back."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """Rotates ``rotary_dim`` channels, the first or the last; the others pass."""

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        self._request = request
        wide = attrs.evolve(
            request, head_dim=request.rotary_dim, trailing=False, dtype="float32", demands=frozenset(), extras={}
        )
        self._reference = context.reference(wide)
        self._device = context.device

    def plan(self, positions: torch.Tensor) -> _Tables:
        """``[T]`` int64 -> cos and sin of every pair."""
        r = self._request
        half = r.rotary_dim // 2
        unit = torch.zeros((len(positions), 1, r.rotary_dim), dtype=torch.float32, device=positions.device)
        first = slice(0, None, 2) if r.interleaved else slice(0, half)
        second = slice(1, None, 2) if r.interleaved else slice(half, None)
        unit[..., first] = 1.0
        turned = self._reference.run(unit, self._reference.plan(positions))
        cos, sin = turned[..., first], turned[..., second]
        repeated = [
            part.repeat_interleave(2, dim=-1) if r.interleaved else torch.cat((part, part), dim=-1)
            for part in (cos, sin)
        ]
        return _Tables(repeated[0][None], repeated[1][None])

    def run(self, x: torch.Tensor, plan: _Tables, inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape and dtype, fresh memory; products in float32."""
        r = self._request
        if not x.numel():
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        start = r.head_dim - r.rotary_dim if r.trailing else 0
        part = x[..., start : start + r.rotary_dim].float().contiguous()[None]
        mode = "interleave" if r.interleaved else "half"
        sin = -plan.sin if inverse else plan.sin
        turned: torch.Tensor = torch.ops.npu.npu_rotary_mul(part, plan.cos, sin, mode)[0].to(x.dtype)
        if r.rotary_dim == r.head_dim:
            return turned
        return torch.cat((x[..., :start], turned, x[..., start + r.rotary_dim :]), dim=-1)
