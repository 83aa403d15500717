"""``penalties``: repetition, frequency and presence, from the tokens before each row's position.

Tokens are counted into a scratch row; the first program thread that takes a token's count applies the penalties, so
that the vocabulary is not read.

Floor: bytes, 4 for each token of history and 8 for each logit changed; here a scratch row of zeros besides, 4·N·V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

BLOCK = 1024


@triton.jit(do_not_specialize=["most"])
def count_kernel(
    counts, history, slots, positions, prompt_len, presence, frequency, repetition, vocab_size, history_stride, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts of the history): 1 for each token of the output, and bit 30 for one of the prompt."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    off = (tl.load(presence + slot) == 0.0) & (tl.load(frequency + slot) == 0.0) & (tl.load(repetition + slot) == 1.0)
    if not off:
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(history + slot * history_stride + place, mask=place < most, other=-1)
        usable = (place < tl.load(positions + row)) & (token >= 0) & (token < vocab_size)
        output = place >= tl.load(prompt_len + slot)
        target = counts + row.to(tl.int64) * vocab_size + token
        tl.atomic_add(target, 1, mask=usable & output, sem="relaxed")
        tl.atomic_or(target, 1 << 30, mask=usable & (place < tl.load(prompt_len + slot)), sem="relaxed")


@triton.jit(do_not_specialize=["most"])
def penalise_kernel(
    logits, counts, history, slots, positions, presence, frequency, repetition, vocab_size, row_stride,
    history_stride, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N, parts of the history). Taking a count leaves a zero, so that a token is penalised once."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    each = tl.load(frequency + slot)
    once = tl.load(presence + slot)
    factor = tl.load(repetition + slot)
    if not ((once == 0.0) & (each == 0.0) & (factor == 1.0)):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(history + slot * history_stride + place, mask=place < most, other=-1)
        usable = (place < tl.load(positions + row)) & (token >= 0) & (token < vocab_size)
        found = tl.atomic_xchg(counts + row.to(tl.int64) * vocab_size + token, 0, mask=usable, sem="relaxed")
        mine = usable & (found != 0)
        produced = (found & 0x3FFFFFFF).to(tl.float32)
        target = logits + row.to(tl.int64) * row_stride + token
        score = tl.load(target, mask=mine, other=0.0)
        score = tl.where(score > 0.0, tl.div_rn(score, factor), score * factor)
        score = score - each * produced
        score = score - tl.where(produced > 0.0, once, 0.0)
        tl.store(target, score, mask=mine)


class Penalties:
    """Repetition (prompt and output), then frequency and presence (output): tokens before the row's position."""

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        rows, vocab_size = logits.shape
        most = min(batch.max_position, batch.state.history.shape[1])
        if rows == 0 or most == 0:
            return logits
        state, history = batch.state, batch.state.history
        counts = torch.zeros((rows, vocab_size), dtype=torch.int32, device=logits.device)
        of_row = (state.presence, state.frequency, state.repetition)
        grid = (rows, triton.cdiv(most, BLOCK))
        count_kernel[grid](
            counts, history, batch.slots, batch.positions, state.prompt_len, *of_row, vocab_size,
            history.stride(0), most, BLOCK=BLOCK,
        )  # fmt: skip
        penalise_kernel[grid](
            logits, counts, history, batch.slots, batch.positions, *of_row, vocab_size, logits.stride(0),
            history.stride(0), most,
            BLOCK=BLOCK,
        )  # fmt: skip
        return logits
