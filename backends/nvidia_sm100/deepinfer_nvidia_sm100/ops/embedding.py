"""``pointwise.embedding``: rows of a table.

Floor: bytes, 2·T·H elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, EmbeddingRequest

from .dependent import dependent, take_turn

BLOCK = 1024


@triton.jit
def embedding_kernel(token_ids, table, out, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    token = tl.load(token_ids + row * step)
    tl.store(out + row * WIDTH + column, tl.load(table + token * WIDTH + column, mask=mask), mask=mask)


class Embedding:
    """Token embedding in the compute dtype."""

    def __init__(self, request: EmbeddingRequest, context: BuildContext) -> None:
        self._dtype: torch.dtype = getattr(torch, request.dtype)
        self._device = context.device

    def prepare(self, weight: torch.Tensor) -> torch.Tensor:
        """``[vocab_size, hidden]`` on the device in the request's dtype; used as it is if it already is that."""
        return weight.to(device=self._device, dtype=self._dtype).contiguous()

    def run(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 -> ``[T, hidden]``."""
        rows, width = token_ids.shape[0], weight.shape[1]
        out = torch.empty((rows, width), dtype=weight.dtype, device=weight.device)
        if rows:
            grid = (rows, triton.cdiv(width, BLOCK))
            step = token_ids.stride(0)  # ids may be a column of several
            embedding_kernel[grid](token_ids, weight, out, step, WIDTH=width, BLOCK=BLOCK, **dependent(out))
        return out
