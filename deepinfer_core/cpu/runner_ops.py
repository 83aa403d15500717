"""The gathers around a forward pass, in numpy over the tensors' memory: for small arrays torch's calls cost more."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_core.api import AppendTokensRequest, BuildContext, InputIdsRequest, SlotMappingRequest


class InputIds:
    """Token ids of a step's rows, from the history."""

    def __init__(self, request: InputIdsRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``history [S, L]`` int32, ``row_slots [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        return torch.from_numpy(history.numpy()[row_slots.numpy(), positions.numpy()].astype(np.int64))


class SlotMapping:
    """Cache row of each query row."""

    def __init__(self, request: SlotMappingRequest, context: BuildContext) -> None:
        self._block_size = request.block_size

    def run(self, block_table: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``block_table [R, B]`` int32, ``row_requests [T]``, ``positions [T]`` int64 -> ``[T]`` int64."""
        number, offset = np.divmod(positions.numpy(), self._block_size)
        blocks = block_table.numpy()[row_requests.numpy(), number].astype(np.int64)
        return torch.from_numpy(blocks * self._block_size + offset)


class AppendTokens:
    """Records drawn tokens in the history."""

    def __init__(self, request: AppendTokensRequest, context: BuildContext) -> None:
        pass

    def run(self, history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """``history[slots, positions] = token_ids``; -1 (a failed row) is stored as 0, a legal id to read back."""
        history.numpy()[slots.numpy(), positions.numpy()] = np.maximum(token_ids.numpy(), 0)
