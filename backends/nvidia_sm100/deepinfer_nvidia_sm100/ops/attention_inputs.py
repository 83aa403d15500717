"""``fused.attention_inputs``: from the merged product to rotated queries, and keys and values in the cache, at once.

Floor: bytes, 2·T·(H + 2·KV)·D elements, each read and written once; its parts are five kernels that move nearly twice
as much. A decode step has so few rows that what counts is the kernels not started: about two microseconds each.

Positions are looked up before the kernel's turn comes (:mod:`.dependent`): they are copied from the host, so no
earlier kernel of the step writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import AttentionInputsRequest, BuildContext, LayerCache, StepLayout

from .dependent import dependent, take_turn
from .rope import angle_table
from .shapes import power_of_two
from .write_kv import kept

ELEMENTS = 1024
"""Of one program, in each of what it reads: few, so that one row still gives work to many multiprocessors."""


@triton.jit
def turned(first, second, cos, sin, weight, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Both halves ``[heads, HEAD_DIM / 2]`` of some heads: normed, rounded as the norm's result is, and rotated."""
    half: tl.constexpr = HEAD_DIM // 2
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if NORM:
        column = tl.arange(0, half)
        low = tl.load(weight + column).to(tl.float32)
        high = tl.load(weight + half + column).to(tl.float32)
        total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = 1.0 / tl.sqrt(total / HEAD_DIM + eps)
        first = (first * scale[:, None] * low[None, :]).to(DTYPE).to(tl.float32)
        second = (second * scale[:, None] * high[None, :]).to(DTYPE).to(tl.float32)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def inputs_kernel(
    qkv,
    positions,
    slots,
    table,
    q_norm,
    k_norm,
    query,
    key_cache,
    value_cache,
    row_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (T, parts of the query heads, then parts of the key heads). HEADS heads a program.

    ``qkv [T, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM]``; ``table [P, HEAD_DIM]`` float32: cosines, then sines.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = HEAD_DIM // 2
    query_parts: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    column = tl.arange(0, half)
    position = tl.load(positions + token)
    cos = tl.load(table + position * HEAD_DIM + column)
    sin = tl.load(table + position * HEAD_DIM + half + column)
    take_turn(DEPENDENT)
    row = qkv + token * row_stride
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < Q_HEADS)[:, None]
        place = head[:, None] * HEAD_DIM + column[None, :]
        first = tl.load(row + place, mask=mask, other=0.0)
        second = tl.load(row + half + place, mask=mask, other=0.0)
        low, high = turned(first, second, cos, sin, q_norm, eps, HEAD_DIM, NORM, query.dtype.element_ty)
        target = query + token * (Q_HEADS * HEAD_DIM) + place
        tl.store(target, low.to(query.dtype.element_ty), mask=mask)
        tl.store(target + half, high.to(query.dtype.element_ty), mask=mask)
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        mask = (head < KV_HEADS)[:, None]
        place = head[:, None] * HEAD_DIM + column[None, :]
        keys = row + Q_HEADS * HEAD_DIM + place
        values = keys + KV_HEADS * HEAD_DIM
        first = tl.load(keys, mask=mask, other=0.0)
        second = tl.load(keys + half, mask=mask, other=0.0)
        value_first = tl.load(values, mask=mask, other=0.0)
        value_second = tl.load(values + half, mask=mask, other=0.0)
        cached = tl.load(slots + token) * (KV_HEADS * HEAD_DIM) + place
        low, high = turned(first, second, cos, sin, k_norm, eps, HEAD_DIM, NORM, query.dtype.element_ty)
        tl.store(key_cache + cached, kept(low.to(query.dtype.element_ty), key_cache), mask=mask)
        tl.store(key_cache + cached + half, kept(high.to(query.dtype.element_ty), key_cache), mask=mask)
        tl.store(value_cache + cached, kept(value_first, value_cache), mask=mask)
        tl.store(value_cache + cached + half, kept(value_second, value_cache), mask=mask)


class AttentionInputs:
    """Norm of each head where the request has one, rotary embedding of halves, cache write."""

    def __init__(self, request: AttentionInputsRequest, context: BuildContext) -> None:
        self._request = request
        self._table = angle_table(request.rope, context)
        most = max(request.q_heads, request.kv_heads)
        self._heads = min(power_of_two(most), max(1, ELEMENTS // request.head_dim))
        self._parts = triton.cdiv(request.q_heads, self._heads) + triton.cdiv(request.kv_heads, self._heads)

    def plan(self, layout: StepLayout) -> StepLayout:
        """The layout itself: the kernel looks positions and slots up."""
        return layout

    def run(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        plan: StepLayout,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, (q_heads + 2 * kv_heads) * head_dim]`` -> queries ``[T, q_heads, head_dim]``, fresh memory."""
        request = self._request
        qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
        rows = qkv.shape[0]
        query = torch.empty((rows, request.q_heads, request.head_dim), dtype=qkv.dtype, device=qkv.device)
        if rows:
            norm = q_norm is not None and k_norm is not None
            inputs_kernel[(rows, self._parts)](
                qkv,
                plan.positions,
                plan.slot_mapping,
                self._table,
                q_norm if norm else qkv,
                k_norm if norm else qkv,
                query,
                cache["key"],
                cache["value"],
                qkv.stride(0),
                request.norm_eps or 0.0,
                Q_HEADS=request.q_heads,
                KV_HEADS=request.kv_heads,
                HEAD_DIM=request.head_dim,
                HEADS=self._heads,
                NORM=norm,
                num_warps=max(1, min(4, self._heads * request.head_dim // 256)),
                **dependent(qkv),
            )
        return query
