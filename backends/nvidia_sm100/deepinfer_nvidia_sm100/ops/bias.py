"""``bias``: adds a few values to a row.

Floor: a launch; 20 bytes for each biased id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

from .shapes import power_of_two


@triton.jit
def bias_kernel(logits, slots, ids, values, vocab_size, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N,). A request's ids differ from each other."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    entry = tl.arange(0, BLOCK)
    token = tl.load(ids + slot * WIDTH + entry, mask=entry < WIDTH, other=-1)
    usable = (token >= 0) & (token < vocab_size)
    added = tl.load(values + slot * WIDTH + entry, mask=entry < WIDTH, other=0.0)
    place = logits + row.to(tl.int64) * row_stride + token
    tl.store(place, tl.load(place, mask=usable, other=0.0) + added, mask=usable)


class Bias:
    """Adds ``bias_values`` to the logits of ``bias_ids``."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        ids = batch.state.bias_ids
        if logits.shape[0] and ids.shape[1]:
            bias_kernel[(logits.shape[0],)](
                logits,
                batch.slots,
                ids,
                batch.state.bias_values,
                logits.shape[1],
                logits.stride(0),
                WIDTH=ids.shape[1],
                BLOCK=power_of_two(ids.shape[1]),
                num_warps=1,
            )
        return logits
