"""Where pooled entries lie: the arithmetic of a group with one row for several tokens."""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import StepLayout


@attrs.frozen(eq=False)
class RequestEntries:
    """Rows ``start:end`` of the step see the entries at ``(blocks, offsets)`` where ``visible [q, n]``."""

    start: int
    end: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    visible: torch.Tensor


def spans(layout: StepLayout) -> list[tuple[int, int, int, int]]:
    """(request, first row, end row, context length) of every request that has rows."""
    found = []
    start = 0
    for index, (length, context) in enumerate(
        zip(layout.host_query_lens.tolist(), layout.host_seq_lens.tolist(), strict=True)
    ):
        if length:
            found.append((index, start, start + length, context))
        start += length
    return found


def token_rows(layout: StepLayout, request: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(block, offset) of a request's tokens in a group with one row a token."""
    number = torch.div(positions, layout.block_size, rounding_mode="floor")
    return layout.block_table[request].to(torch.int64)[number], positions % layout.block_size


def request_entries(layout: StepLayout, rate: int, span: tuple[int, int, int, int]) -> RequestEntries:
    """All complete entries of a request, and which of its rows sees which."""
    request, start, end, context = span
    entry = torch.arange(context // rate, device=layout.block_table.device)
    rows = layout.block_size // rate
    blocks = layout.block_table[request].to(torch.int64)[torch.div(entry, rows, rounding_mode="floor")]
    closed = torch.div(layout.positions[start:end, None] + 1, rate, rounding_mode="floor")
    return RequestEntries(start, end, blocks, entry % rows, entry < closed)
