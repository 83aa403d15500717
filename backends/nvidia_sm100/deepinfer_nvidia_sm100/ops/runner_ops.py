"""The gathers around a forward pass, one launch each.

Floor: a launch; a few bytes for each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepinfer_core.api import AppendTokensRequest, BuildContext, InputIdsRequest, SlotMappingRequest

from .dependent import dependent, take_turn

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def input_ids_kernel(history, slots, positions, out, count, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    take_turn(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    slot = tl.load(slots + row, mask=mask, other=0)
    position = tl.load(positions + row, mask=mask, other=0)
    tl.store(out + row, tl.load(history + slot * stride + position, mask=mask, other=0).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["count", "stride"])
def slot_mapping_kernel(
    table, owners, positions, out, count, stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    take_turn(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    owner = tl.load(owners + row, mask=mask, other=0)
    position = tl.load(positions + row, mask=mask, other=0)
    number = tl.load(table + owner * stride + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(out + row, number * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)


@triton.jit(do_not_specialize=["count"])
def append_kernel(history, slots, positions, tokens, count, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    take_turn(DEPENDENT)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    slot = tl.load(slots + row, mask=mask, other=0)
    position = tl.load(positions + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=0)
    tl.store(history + slot * stride + position, tl.maximum(token, 0).to(tl.int32), mask=mask)


class InputIds:
    """Token ids of a step's rows, from the history."""

    def __init__(self, request: InputIdsRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``history [S, L]`` int32, ``row_slots [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        count = positions.shape[0]
        out = torch.empty(count, dtype=torch.int64, device=positions.device)
        if count:
            grid = (triton.cdiv(count, BLOCK),)
            input_ids_kernel[grid](
                history, row_slots, positions, out, count, history.stride(0), BLOCK=BLOCK, **dependent(positions)
            )
        return out


class SlotMapping:
    """Cache row of each query row."""

    def __init__(self, request: SlotMappingRequest, context: BuildContext) -> None:
        self._block_size = request.block_size

    def run(self, block_table: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``block_table [R, B]`` int32, ``row_requests [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        count = positions.shape[0]
        out = torch.empty(count, dtype=torch.int64, device=positions.device)
        if count:
            slot_mapping_kernel[(triton.cdiv(count, BLOCK),)](
                block_table,
                row_requests,
                positions,
                out,
                count,
                block_table.stride(0),
                BLOCK_SIZE=self._block_size,
                BLOCK=BLOCK,
                **dependent(positions),
            )
        return out


class AppendTokens:
    """Records drawn tokens in the history."""

    def __init__(self, request: AppendTokensRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """``history[slots, positions] = token_ids``; -1 (a failed row) is stored as 0, a legal id to read back."""
        count = positions.shape[0]
        if count:
            grid = (triton.cdiv(count, BLOCK),)
            append_kernel[grid](
                history, slots, positions, token_ids, count, history.stride(0), BLOCK=BLOCK, **dependent(positions)
            )
