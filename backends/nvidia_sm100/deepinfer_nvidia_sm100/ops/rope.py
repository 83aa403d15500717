"""``pointwise.rope``: halves of the first channels turned by the position's angle.

Floor: bytes, 2·T·H·D elements. cos and sin come from a table in float32 of every position, 4·D bytes a row, made
once from the reference operator by turning unit vectors, so that the angles are its own.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, RopeRequest
from deepinfer_core.api import Rope as RopeOperator

from .dependent import dependent, take_turn
from .shapes import heads_view, power_of_two

AT_ONCE = 1 << 16
"""Positions turned at a time when the table is made."""


@triton.jit
def rope_kernel(
    x,
    positions,
    table,
    out,
    heads,
    stride_t,
    stride_h,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token and HEADS_BLOCK heads a program. ``table [P, ROTARY]``: cosines, then sines."""
    take_turn(DEPENDENT)
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, HALF_BLOCK)
    position = tl.load(positions + token)
    half: tl.constexpr = ROTARY // 2
    cos = tl.load(table + position * ROTARY + column, mask=column < half, other=0.0)
    sin = tl.load(table + position * ROTARY + half + column, mask=column < half, other=0.0)
    if INVERSE:
        sin = -sin
    mask = (head < heads)[:, None] & (column < half)[None, :]
    source = x + token.to(tl.int64) * stride_t + head[:, None] * stride_h
    target = out + (token.to(tl.int64) * heads + head[:, None]) * HEAD_DIM
    first = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half + column[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = first * cos[None, :] - second * sin[None, :]
    other = second * cos[None, :] + first * sin[None, :]
    tl.store(target + column[None, :], turned.to(out.dtype.element_ty), mask=mask)
    tl.store(target + half + column[None, :], other.to(out.dtype.element_ty), mask=mask)
    if ROTARY < HEAD_DIM:
        rest = ROTARY + tl.arange(0, REST_BLOCK)
        passing = (head < heads)[:, None] & (rest < HEAD_DIM)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=passing), mask=passing)


def angle_table(request: RopeRequest, context: BuildContext) -> torch.Tensor:
    """``[max_positions, rotary_dim]`` float32: cosines of all pairs, then sines, both with the scaling's factor."""
    wide = attrs.evolve(request, dtype="float32", head_dim=request.rotary_dim, demands=frozenset())
    reference: RopeOperator = context.reference(wide)
    parts = []
    for start in range(0, request.max_positions, AT_ONCE):
        count = min(AT_ONCE, request.max_positions - start)
        unit = torch.zeros((count, 1, request.rotary_dim), device=context.device)
        unit[..., : request.rotary_dim // 2] = 1.0  # (1, 0) turns to (cos, sin)
        plan = reference.plan(torch.arange(start, start + count, device=context.device))
        parts.append(reference.run(unit, plan)[:, 0])
    return torch.cat(parts)


class Rope:
    """Rotary embedding of halves."""

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        self._request = request
        self._table = angle_table(request, context)
        self._half = power_of_two(request.rotary_dim // 2)
        self._rest = power_of_two(max(1, request.head_dim - request.rotary_dim))

    @property
    def table(self) -> torch.Tensor:
        """``[max_positions, rotary_dim]`` float32, for kernels that rotate on their way."""
        return self._table

    def plan(self, positions: torch.Tensor) -> torch.Tensor:
        """The positions themselves: the kernel looks their angles up."""
        return positions

    def run(self, x: torch.Tensor, plan: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape and dtype, fresh memory."""
        x = heads_view(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tokens, heads, dim = x.shape
        if tokens == 0 or heads == 0:
            return out
        block = min(16, power_of_two(heads))
        rope_kernel[(tokens, triton.cdiv(heads, block))](
            x,
            plan,
            self._table,
            out,
            heads,
            x.stride(0),
            x.stride(1),
            HEAD_DIM=dim,
            ROTARY=self._request.rotary_dim,
            HALF_BLOCK=self._half,
            REST_BLOCK=self._rest,
            HEADS_BLOCK=block,
            INVERSE=inverse,
            num_warps=2,
            **dependent(x),
        )
        return out
