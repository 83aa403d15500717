"""Step layouts made here: every query row as a request of its own, and small ones for trying operators."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from deepinfer_core.api import StepLayout


def owners_of(layout: StepLayout) -> torch.Tensor:
    """``[T]`` int64 on the layout's device: the request of each row."""
    owners = np.repeat(np.arange(len(layout.host_query_lens)), layout.host_query_lens)
    return torch.from_numpy(owners).to(layout.block_table.device)


def host_positions(layout: StepLayout) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``[T]``: the position of each row, from the host copies."""
    lens, contexts = layout.host_query_lens.astype(np.int64), layout.host_seq_lens.astype(np.int64)
    return np.arange(int(lens.sum())) + np.repeat(contexts - np.cumsum(lens), lens)


def rows_alone(layout: StepLayout) -> StepLayout:
    """The same rows as requests of one row each, whose context ends with the row itself."""
    positions = host_positions(layout)
    rows = len(positions)
    device = layout.block_table.device
    return attrs.evolve(
        layout,
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=device),
        seq_lens=(layout.positions + 1).to(torch.int32),
        block_table=layout.block_table.index_select(0, owners_of(layout)),
        host_query_lens=np.ones(rows, np.int32),
        host_seq_lens=(positions + 1).astype(np.int32),
        max_query_len=min(rows, 1),
        max_seq_len=int(positions.max()) + 1 if rows else 0,
    )


def layout_of(
    block_table: torch.Tensor,
    block_size: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> StepLayout:
    """The layout of a step on the host. ``block_table [R, B]`` int32."""
    lens, contexts = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    spans = [np.arange(c - q, c) for q, c in zip(query_lens, seq_lens, strict=True)]
    positions = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *spans]))
    owners = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    blocks = block_table.to(torch.int64)[owners, positions // block_size]
    return StepLayout(
        block_size=block_size,
        cu_seqlens=torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32)),
        seq_lens=torch.from_numpy(contexts),
        positions=positions,
        block_table=block_table,
        slot_mapping=blocks * block_size + positions % block_size,
        host_query_lens=lens,
        host_seq_lens=contexts,
        max_query_len=int(lens.max(initial=0)),
        max_seq_len=int(contexts.max(initial=0)),
    )
