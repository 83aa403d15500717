"""Paged attention on the host, float32: products over tiles of rows, columns by each row's own position.

A row's columns, and so the order in which its softmax and its weighted sum add up, depend on its position and the
window. How many rows share a product depends on the step: products are used only with row counts that keep a row's
bits, which is tried when the operator is built. Keys are gathered, once for all rows of a request. So are values, but
for decode rows: there a weighted sum over rows of the cache adds the same numbers in the same order, as is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import attrs
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout

from .attention_check import check_paged, check_products
from .attention_tiles import ROWS_STEP, VALUE_BLOCK, Runs, Span, Tile, runs_of, spans_of

KEPT = 1 << 25
"""Columns of a step up to this many are kept for all layers; more are made again for each."""


@attrs.frozen(eq=False)
class Plan:
    """``spans``: made once, or None when they are too large."""

    layout: StepLayout
    runs: Runs
    spans: tuple[Span, ...] | None


class PagedAttention:
    """``softmax(scale * q k^T) v`` over the visible positions of each row."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._group = request.q_heads // request.kv_heads
        self._memory: dict[str, torch.Tensor] = {}
        self._in_place = self._tried(context.num_threads)
        check_paged(self, request, context.num_threads)
        self._forget()  # was made in inference mode

    def _tried(self, num_threads: int) -> bool:
        """Whether decode rows may be attended to in place; raises PlanError where products are not steady."""
        return check_products(self._request.head_dim, num_threads)

    def _forget(self) -> None:
        self._memory.clear()

    def arranged(self, cache: LayerCache) -> LayerCache:
        """``key`` and ``value [blocks, block_size, kv_heads, head_dim]`` in this operator's layout."""
        return cache

    def plan(self, layout: StepLayout) -> Plan:
        """What each row reads, from the host copies of the step's layout."""
        runs = runs_of(self._request, layout)
        if int((runs.count * runs.width).sum()) * self._request.q_heads > KEPT:
            return Plan(layout, runs, None)
        return Plan(layout, runs, tuple(self._spans(layout, runs)))

    def _spans(self, layout: StepLayout, runs: Runs) -> Iterator[Span]:
        return spans_of(self._request, layout, runs)

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` float32 -> the same shape, fresh memory."""
        output = torch.empty(query.shape)
        self._attend(query, cache, plan, output)
        return output

    def _attend(self, query: torch.Tensor, cache: LayerCache, plan: Plan, output: torch.Tensor) -> None:
        spans = plan.spans
        for span in self._spans(plan.layout, plan.runs) if spans is None else spans:
            key = self._gathered(cache, "key", span)
            if span.lists is not None and self._in_place:
                (tile,) = span.tiles
                weights = self._weights(query, key, span, tile)
                tile.put(self._listed(weights, cache["value"], span), output)
                continue
            value = self._gathered(cache, "value", span)
            # A weight of 0 hides the values of later rows, unless they are not finite.
            finite = bool(torch.isfinite(value.sum()))
            for tile in span.tiles:
                weights = self._weights(query, key, span, tile)
                attended = self._weighted(weights, value, span, tile)
                if not finite:
                    attended = self._without_lost(weights, value, span, tile, attended)
                tile.put(attended, output)

    def _gathered(self, cache: LayerCache, name: str, span: Span) -> torch.Tensor:
        """``[R, kv_heads, columns, head_dim]``, or heads first if the span goes by them; not contiguous."""
        r, rows = self._request, cache[name].flatten(1)
        found = self._room(name, len(span.blocks), rows.shape[1])
        torch.index_select(rows, 0, span.blocks, out=found)
        by_column = found.view(span.requests, -1, r.kv_heads, r.head_dim)[:, span.skip :]
        return by_column.permute((2, 0, 1, 3) if span.by_head else (0, 2, 1, 3))

    def _weights(self, query: torch.Tensor, key: torch.Tensor, span: Span, tile: Tile) -> torch.Tensor:
        """``[R, kv_heads, rows, width]``, or heads first: rows of queries, heads of a group innermost, filled up."""
        r, rows = self._request, tile.count * self._group
        filled = -(-rows // ROWS_STEP) * ROWS_STEP
        q = self._room("query", *key.shape[:2], filled, r.head_dim)
        chosen = tile.of(query).reshape(-1, tile.count, r.kv_heads, self._group, r.head_dim)
        chosen = chosen.permute((2, 0, 1, 3, 4) if span.by_head else (0, 2, 1, 3, 4))
        torch.mul(chosen, r.scale, out=q[:, :, :rows].view(chosen.shape))
        scores = self._room("scores", *key.shape[:2], filled, tile.width)
        columns = key[:, :, tile.start : tile.start + tile.width].transpose(2, 3)
        for number, part in enumerate(columns):
            torch.bmm(q[number], part, out=scores[number])
        if tile.seen < tile.width:
            late = scores[:, :, :rows, tile.seen :].view(*key.shape[:2], tile.count, self._group, -1)
            late.masked_fill_(tile.hidden.transpose(0, 1) if span.by_head else tile.hidden, float("-inf"))
        return torch.softmax(scores, dim=-1, out=scores)

    def _weighted(self, weights: torch.Tensor, value: torch.Tensor, span: Span, tile: Tile) -> torch.Tensor:
        """``[R * count, q_heads, head_dim]``: block after block of columns."""
        total = weights.new_empty((*weights.shape[:3], self._request.head_dim))
        for number, (shares, columns) in enumerate(zip(weights, value, strict=True)):
            for at in range(0, tile.width, VALUE_BLOCK):
                end = min(at + VALUE_BLOCK, tile.width)
                part, block = shares[:, :, at:end], columns[:, tile.start + at : tile.start + end]
                if at:
                    torch.baddbmm(total[number], part, block, out=total[number])
                else:
                    torch.bmm(part, block, out=total[number])
        rows = total[:, :, : tile.count * self._group]
        return self._by_row(rows.view(*rows.shape[:2], tile.count, self._group, -1), span)

    def _listed(self, weights: torch.Tensor, value: torch.Tensor, span: Span) -> torch.Tensor:
        """The same for one row a request, values where they lie."""
        assert span.lists is not None
        flat, rows = weights[:, :, : self._group].reshape(-1), value.view(-1, self._request.head_dim)
        sums = torch.embedding_bag(rows, span.lists.columns, span.lists.offsets, False, 0, False, flat)[0]
        blocks = sums.view(*weights.shape[:2], 1, self._group, -1, rows.shape[1])
        total = blocks[..., 0, :]
        for number in range(1, blocks.shape[4]):
            total = total + blocks[..., number, :]
        return self._by_row(total, span)

    def _by_row(self, attended: torch.Tensor, span: Span) -> torch.Tensor:
        """``[R, kv_heads, count, group, head_dim]``, or heads first -> ``[R * count, q_heads, head_dim]``."""
        ordered = attended.permute((1, 2, 0, 3, 4) if span.by_head else (0, 2, 1, 3, 4))
        return ordered.reshape(-1, self._request.q_heads, self._request.head_dim)

    def _without_lost(
        self, weights: torch.Tensor, value: torch.Tensor, span: Span, tile: Tile, attended: torch.Tensor
    ) -> torch.Tensor:
        """``attended``, and for rows before the first value that is not finite, as if those were 0."""
        finite = torch.isfinite(value).all(-1).all(0 if span.by_head else 1)
        first = torch.where(finite.all(1), value.shape[2], (~finite).int().argmax(1))
        before = (tile.ends <= first[:, None]).view(-1, 1, 1)
        clean = self._weighted(weights, torch.nan_to_num(value, 0.0, 0.0, 0.0), span, tile)
        return torch.where(before, clean, attended)

    def _room(self, name: str, *shape: int) -> torch.Tensor:
        """Memory that is used again by the next call: fresh pages cost more than what is written to them."""
        size = prod(shape)
        held = self._memory.get(name)
        if held is None or held.numel() < size:
            held = self._memory[name] = torch.zeros(size)
        return held[:size].view(shape)
