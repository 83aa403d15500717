"""``attention.write_kv``: this step's keys and values into their cache rows, rounded if these are in FP8.

Floor: bytes, 4·T·KV·D elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, LayerCache, StepLayout, WriteKVRequest

from .dependent import dependent, take_turn
from .shapes import power_of_two


@triton.jit
def kept(values, cache):
    """In the cache's type. FP8 has no infinity: what is past its largest becomes that, and NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv:
        wide = values.to(tl.float32)
        values = tl.where(wide == wide, tl.clamp(wide, -448.0, 448.0), wide)
    return values.to(cache.dtype.element_ty)


@triton.jit
def write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token a program: all its heads, WIDTH = kv_heads * HEAD_DIM elements of key and of value."""
    take_turn(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = element < WIDTH
    head, channel = element // HEAD_DIM, element % HEAD_DIM
    target = tl.load(slots + token) * WIDTH + element
    new_key = tl.load(key + token * key_stride_t + head * key_stride_h + channel, mask=mask)
    new_value = tl.load(value + token * value_stride_t + head * value_stride_h + channel, mask=mask)
    tl.store(key_cache + target, kept(new_key, key_cache), mask=mask)
    tl.store(value_cache + target, kept(new_value, value_cache), mask=mask)


class WriteKV:
    """Scatters new keys and values into their cache rows."""

    def __init__(self, request: WriteKVRequest, context: BuildContext) -> None:
        self._dim = request.head_dim
        self._width = request.kv_heads * request.head_dim
        self._block = power_of_two(self._width)

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``, and nothing else."""
        if key.shape[0] == 0:
            return
        key = key if key.stride(-1) == 1 else key.contiguous()
        value = value if value.stride(-1) == 1 else value.contiguous()
        write_kernel[(key.shape[0],)](
            key,
            value,
            cache["key"],
            cache["value"],
            layout.slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            HEAD_DIM=self._dim,
            WIDTH=self._width,
            BLOCK=self._block,
            num_warps=max(1, min(8, self._block // 256)),
            **dependent(key),
        )
