"""Runner operators: the small gathers around a model's forward pass, each replaceable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class InputIdsRequest(OpRequest):
    """Asks for :class:`InputIds`."""

    op: ClassVar[str] = "runner.input_ids"


class InputIds(Protocol):
    """Token ids of a step's rows, read from the device-resident history.

    The draw of step t appends to the history, so the ids of step t+1 need no host.
    """

    def run(self, history: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``history [S, L]`` int32, ``row_slots [T]``, ``positions [T]`` int64 -> ``[T]`` int64. Capturable."""
        ...


@attrs.frozen(kw_only=True)
class SlotMappingRequest(OpRequest):
    """Asks for :class:`SlotMapping`; ``block_size`` in tokens."""

    op: ClassVar[str] = "runner.slot_mapping"

    block_size: int


class SlotMapping(Protocol):
    """Cache row of each query row."""

    def run(self, block_table: torch.Tensor, row_requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``block_table [R, B]`` int32, ``row_requests [T]``, ``positions [T]`` int64 -> ``[T]`` int64.

        ``block_table[row, position // block_size] * block_size + position % block_size``. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class AppendTokensRequest(OpRequest):
    """Asks for :class:`AppendTokens`."""

    op: ClassVar[str] = "runner.append_tokens"


class AppendTokens(Protocol):
    """Record drawn tokens in the device-resident history."""

    def run(self, history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """``history[slots, positions] = token_ids`` (``[N]`` int64 each); ids of -1 are stored as 0. Capturable."""
        ...
