"""The gathers and scatters around a forward pass."""

from __future__ import annotations

import torch

from deepinfer_core.api import AppendTokensRequest, BuildContext, InputIdsRequest, SlotMappingRequest


class InputIds:
    """Token ids of a step's rows, from the history."""

    def __init__(self, request: InputIdsRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``history [S, L]`` int32, ``row_slots [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        return history[row_slots, positions].to(torch.int64)


class SlotMapping:
    """Cache row of each query row."""

    def __init__(self, request: SlotMappingRequest, context: BuildContext) -> None:
        self._block_size = request.block_size

    def run(self, block_table: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``block_table [R, B]`` int32, ``row_requests [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        number = torch.div(positions, self._block_size, rounding_mode="floor")
        block = block_table[row_requests, number].to(torch.int64)
        return block * self._block_size + positions % self._block_size


class AppendTokens:
    """Records drawn tokens in the history."""

    def __init__(self, request: AppendTokensRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """``history[slots, positions] = token_ids``; -1 (a failed row) is stored as 0, a legal id to read back."""
        history[slots, positions] = token_ids.clamp(min=0).to(history.dtype)
