"""``logprobs``: log-softmax at the chosen token, its rank, and the best k.

Floor: bytes, 4·N·V: the logits once; here twice, and a selection over 64-bit keys when alternatives are asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, LogprobsResult, SamplingRequest

BLOCK = 4096
TOGETHER = 256
"""Rows whose alternatives are selected at once: keys take three times the logits' memory, of prompts gigabytes."""


@triton.jit
def chosen_kernel(logits, token_ids, chosen, rank, normaliser, vocab_size, row_stride, BLOCK: tl.constexpr):
    """Grid (N,): log-probability and rank of one token, and the row's logarithm of sums."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    token = tl.load(token_ids + row)
    score = tl.load(base + tl.maximum(token, 0))
    column = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    better = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + column < vocab_size
        value = tl.load(base + start + column, mask=inside, other=float("-inf"))
        peak = tl.maximum(peak, value)
        ahead = (value > score) | ((value == score) & (start + column < token))
        better += (ahead & inside).to(tl.int32)
    top = tl.max(peak, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        value = tl.load(base + start + column, mask=start + column < vocab_size, other=float("-inf"))
        sums += tl.exp(value - top)
    total = top + tl.log(tl.sum(sums, axis=0))
    tl.store(normaliser + row, total)
    tl.store(chosen + row, tl.where(token < 0, float("nan"), score - total))
    tl.store(rank + row, tl.where(token < 0, 0, tl.sum(better, axis=0) + 1).to(tl.int64))


class Logprobs:
    """log-softmax in float32; ranks and order are those of the logits."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 (not changed), ``[N]`` ids, ``0 <= k`` (above V: V) -> :class:`LogprobsResult`.

        A row whose id is -1 (a failed draw) gets NaN and rank 0 as its chosen token's.
        """
        rows, vocab_size = logits.shape
        chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
        rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
        total = torch.empty(rows, dtype=torch.float32, device=logits.device)
        if rows:
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            chosen_kernel[(rows,)](
                logits, token_ids, chosen, rank, total, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=8
            )
        top_ids = torch.cat([_best(some, min(k, vocab_size)) for some in logits.split(TOGETHER)])
        return LogprobsResult(chosen=chosen, rank=rank, top_ids=top_ids, top=logits.gather(1, top_ids) - total[:, None])


def _best(logits: torch.Tensor, k: int) -> torch.Tensor:
    """``[N, k]`` ids by score descending, then id ascending: one selection over keys that hold both."""
    rows, vocab_size = logits.shape
    if k == 0 or rows == 0:
        return torch.zeros((rows, k), dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(vocab_size, device=logits.device)
    keys = order * (1 << 32) + (vocab_size - 1 - ids)
    return vocab_size - 1 - keys.topk(k, dim=-1).values % (1 << 32)
