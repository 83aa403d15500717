"""``mask``: every rule that forbids a token outright.

Floor: bytes, V/8 for each bit mask of a row; a few for stop ids and bad words. Logits are written where forbidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import BuildContext, SamplingBatch, SamplingRequest

from .shapes import power_of_two

PART = 4096


@triton.jit
def bits_kernel(
    logits,
    grammar,
    allowed,
    slots,
    token_limit,
    vocab_size,
    row_stride,
    words,
    GRAMMAR: tl.constexpr,
    ALLOWED: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid (N, parts): padding ids, and ids whose bit is not set in the row's masks ``[., words]`` int32."""
    row = tl.program_id(0)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = token < vocab_size
    forbidden = token >= token_limit
    if GRAMMAR:
        word = tl.load(grammar + row.to(tl.int64) * words + token // 32, mask=inside, other=0)
        forbidden = forbidden | (((word >> (token % 32)) & 1) == 0)
    if ALLOWED:
        slot = tl.load(slots + row)
        word = tl.load(allowed + slot * words + token // 32, mask=inside, other=0)
        forbidden = forbidden | (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row.to(tl.int64) * row_stride + token, float("-inf"), mask=inside & forbidden)


@triton.jit
def ids_kernel(
    logits,
    history,
    slots,
    positions,
    min_end,
    stop_ids,
    bad_words,
    vocab_size,
    row_stride,
    history_stride,
    STOPS: tl.constexpr,
    STOPS_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Grid (N,): stop ids below ``min_end``; the last token of each bad word whose other tokens were just seen."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    target = logits + row.to(tl.int64) * row_stride
    if STOPS > 0:
        entry = tl.arange(0, STOPS_BLOCK)
        stop = tl.load(stop_ids + slot * STOPS + entry, mask=entry < STOPS, other=-1)
        early = position < tl.load(min_end + slot)
        tl.store(target + stop, float("-inf"), mask=early & (stop >= 0) & (stop < vocab_size))
    if WORDS * LENGTH > 0:
        word = tl.arange(0, WORDS_BLOCK)
        base = bad_words + (slot * WORDS + word) * LENGTH
        hit = word < WORDS
        for place in range(LENGTH - 1):
            wanted = tl.load(base + place, mask=word < WORDS, other=-1)
            before = position - (LENGTH - 1 - place)
            there = before >= 0
            token = tl.load(history + slot * history_stride + before, mask=there, other=-1).to(tl.int64)
            hit = hit & ((wanted < 0) | (there & (wanted == token)))
        last = tl.load(base + LENGTH - 1, mask=word < WORDS, other=-1)
        tl.store(target + last, float("-inf"), mask=hit & (last >= 0) & (last < vocab_size))


class Mask:
    """Sets to -inf: padding ids, ids outside the grammar's and the request's masks, stop ids below ``min_end``,
    and the last token of every bad word whose other tokens were just seen (prompt included).
    """

    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, changed in place."""
        rows, vocab_size = logits.shape
        if rows == 0:
            return logits
        state, grammar = batch.state, batch.grammar
        if batch.token_limit < vocab_size or grammar is not None or state.allowed is not None:
            bits_kernel[(rows, triton.cdiv(vocab_size, PART))](
                logits,
                batch.slots if grammar is None else grammar,
                batch.slots if state.allowed is None else state.allowed,
                batch.slots,
                batch.token_limit,
                vocab_size,
                logits.stride(0),
                -(-vocab_size // 32),
                GRAMMAR=grammar is not None,
                ALLOWED=state.allowed is not None,
                PART=PART,
            )
        stops, (_, words, length) = state.stop_ids.shape[1], state.bad_words.shape
        ids_kernel[(rows,)](
            logits,
            state.history,
            batch.slots,
            batch.positions,
            state.min_end,
            state.stop_ids,
            state.bad_words,
            vocab_size,
            logits.stride(0),
            state.history.stride(0),
            STOPS=stops,
            STOPS_BLOCK=power_of_two(max(1, stops)),
            WORDS=words,
            WORDS_BLOCK=power_of_two(max(1, words)),
            LENGTH=length,
            num_warps=1,
        )
        return logits
