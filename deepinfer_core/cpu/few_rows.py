"""Divides a step: requests with few rows (decode rows, drafts), and requests with many (prompt chunks).

The few are handled row by row and all at once, in a number of calls that does not grow with them: each row gathers
the cache rows it sees. The many make a step of their own, for the reference operator.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import StepLayout

FEW_ROWS = 8
"""A request with at most this many rows is gathered for."""

MOST_GATHERED = 1 << 24
"""Elements gathered at once for all rows; a step that needs more is the reference's, which goes by request."""

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@attrs.frozen(eq=False)
class FewRows:
    """Rows that gather.

    Attributes:
        rows: ``[n]`` int64, their numbers in the step; None: every row, in order.
        owners: ``[n]``, each one's request. positions: ``[n]``. table: ``[R, B]`` block ids of all requests.
    """

    rows: torch.Tensor | None
    owners: Ids
    positions: Ids
    table: Ids

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of ``[T, ...]``."""
        return tensor if self.rows is None else tensor.index_select(0, self.rows)

    def cache_rows(self, numbers: Ids, per_block: int) -> Ids:
        """``[n, c]`` numbers of tokens, or of entries, of each row's request -> where they lie in the cache."""
        block, offset = np.divmod(numbers, per_block)
        found: Ids = self.table[self.owners[:, None], block] * per_block + offset
        return found


@attrs.frozen(eq=False)
class ManyRows:
    """``rows [n]`` int64: numbers of the other rows. ``layout``: them as a step."""

    rows: torch.Tensor
    layout: StepLayout

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of ``[T, ...]``."""
        return tensor.index_select(0, self.rows)


def split(layout: StepLayout, few: int = FEW_ROWS) -> tuple[FewRows | None, ManyRows | None]:
    """Requests of up to ``few`` rows, and the others; None for a kind that has no rows."""
    lens = layout.host_query_lens
    owners = np.repeat(np.arange(len(lens)), lens)
    table, positions = layout.block_table.numpy().astype(np.int64), layout.positions.numpy()
    if layout.max_query_len <= few:
        return (FewRows(None, owners, positions, table) if len(owners) else None), None
    gathers = lens <= few
    mine = gathers[owners]
    rows = mine.nonzero()[0]
    gathered = FewRows(torch.from_numpy(rows), owners[rows], positions[rows], table) if len(rows) else None
    return gathered, ManyRows(torch.from_numpy((~mine).nonzero()[0]), _part(layout, ~gathers, ~mine))


def joined(few: tuple[FewRows, torch.Tensor], many: tuple[ManyRows, torch.Tensor]) -> torch.Tensor:
    """Both kinds' results, put together in the order of the step's rows."""
    (gathered, first), (rest, second) = few, many
    assert gathered.rows is not None
    whole = first.new_empty((len(first) + len(second), *first.shape[1:]))
    return whole.index_copy_(0, gathered.rows, first).index_copy_(0, rest.rows, second)


def _part(layout: StepLayout, requests: np.ndarray[Any, np.dtype[np.bool_]], rows: Any) -> StepLayout:
    picked, picked_rows = torch.from_numpy(requests.nonzero()[0]), torch.from_numpy(rows.nonzero()[0])
    lens, contexts = layout.host_query_lens[requests], layout.host_seq_lens[requests]
    return attrs.evolve(
        layout,
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        seq_lens=layout.seq_lens.index_select(0, picked),
        positions=layout.positions.index_select(0, picked_rows),
        block_table=layout.block_table.index_select(0, picked),
        slot_mapping=layout.slot_mapping.index_select(0, picked_rows),
        host_query_lens=lens,
        host_seq_lens=contexts,
        max_query_len=int(lens.max()),
        max_seq_len=int(contexts.max()),
    )
