"""Attention of any device and dtype by the reference operators, each row as a request of its own.

A row's shapes then depend on its own position, and on nothing else. Slow, and there for every device.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    BuildContext,
    CompressRequest,
    IndexTopKRequest,
    LayerCache,
    PagedAttentionRequest,
    RouteRequest,
    SparseAttentionRequest,
    StepLayout,
)

from .layouts import rows_alone


class PagedRowsAlone:
    """Paged attention. The rows of a block that is not causal stay together."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._apart = rows_alone if request.causal else _unchanged

    def plan(self, layout: StepLayout) -> Any:
        """The reference's plan of the rows, one by one."""
        return self._reference.plan(self._apart(layout))

    def run(self, query: torch.Tensor, cache: LayerCache, plan: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, q_heads, head_dim]`` -> the same shape and dtype."""
        attended: torch.Tensor = self._reference.run(query, cache, plan, sinks)
        return attended


class SparseRowsAlone:
    """Attention over a window and entries. The rows of a block that is not causal stay together."""

    def __init__(self, request: SparseAttentionRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)
        self._apart = rows_alone if request.causal else _unchanged

    def write(self, kv: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``kv [T, head_dim]`` at ``layout.slot_mapping``."""
        self._reference.write(kv, cache, layout)

    def plan(self, layout: StepLayout, entry_layout: StepLayout | None = None) -> Any:
        """The reference's plan of the rows, one by one."""
        entries = None if entry_layout is None else self._apart(entry_layout)
        return self._reference.plan(self._apart(layout), entries)

    def run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        entries: LayerCache | None,
        plan: Any,
        sinks: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> the same shape and dtype."""
        attended: torch.Tensor = self._reference.run(query, cache, entries, plan, sinks, chosen)
        return attended


class IndexTopKRowsAlone:
    """The indexer's choice."""

    def __init__(self, request: IndexTopKRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def plan(self, layout: StepLayout) -> Any:
        """The reference's plan of the rows, one by one."""
        return self._reference.plan(rows_alone(layout))

    def run(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        """``[T, heads, head_dim]`` and ``[T, heads]`` -> ``[T, top_k]`` int64."""
        chosen: torch.Tensor = self._reference.run(query, weights, cache, plan)
        return chosen


class CompressRowsAlone:
    """Pooling: every row is a step of its own, in order, so that each window is pooled alone."""

    def __init__(self, request: CompressRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> list[Any]:
        """The reference's plans of steps of one row."""
        tails, entries = _single_steps(tail_layout), _single_steps(entry_layout)
        return [self._reference.plan(tail, entry) for tail, entry in zip(tails, entries, strict=True)]

    def run(
        self,
        value: torch.Tensor,
        gate: torch.Tensor,
        tail: LayerCache,
        entries: LayerCache,
        plan: list[Any],
        position_bias: torch.Tensor,
        norm: torch.Tensor,
    ) -> None:
        """Write tail rows, then the entries of windows that close."""
        for row, step in enumerate(plan):
            span = slice(row, row + 1)
            self._reference.run(value[span], gate[span], tail, entries, step, position_bias, norm)


class RouteRowsAlone:
    """The router's decision, row by row."""

    def __init__(self, request: RouteRequest, context: BuildContext) -> None:
        self._reference: Any = context.reference(request)

    def run(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, experts]`` -> ids and weights ``[T, top_k]``."""
        spans = [slice(row, row + 1) for row in range(logits.shape[0])] or [slice(0, 0)]
        results = [
            self._reference.run(logits[span], bias, None if given is None else given[span], counts) for span in spans
        ]
        return torch.cat([ids for ids, _ in results]), torch.cat([weights for _, weights in results])


def _single_steps(layout: StepLayout) -> list[StepLayout]:

    alone = rows_alone(layout)
    spans = [slice(row, row + 1) for row in range(len(alone.host_query_lens))]
    return [
        attrs.evolve(
            alone,
            cu_seqlens=alone.cu_seqlens[:2],
            seq_lens=alone.seq_lens[span],
            positions=alone.positions[span],
            block_table=alone.block_table[span],
            slot_mapping=alone.slot_mapping[span],
            host_query_lens=alone.host_query_lens[span],
            host_seq_lens=alone.host_seq_lens[span],
            max_seq_len=int(alone.host_seq_lens[span].max()),
        )
        for span in spans
    ]


def _unchanged(layout: StepLayout) -> StepLayout:
    return layout
