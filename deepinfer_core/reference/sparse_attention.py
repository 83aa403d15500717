"""Attention over a window and chosen entries, one request at a time, in float32 or float64."""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, LayerCache, SparseAttentionRequest, StepLayout

from .dtypes import widen
from .entries import RequestEntries, request_entries, spans, token_rows


@attrs.frozen(eq=False)
class _RequestPlan:
    """Rows ``start:end`` see window rows ``(blocks, offsets)`` where ``visible [q, c]``, and perhaps entries."""

    start: int
    end: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    visible: torch.Tensor
    entries: RequestEntries | None


class SparseAttention:
    """``softmax([scale * q k^T, sink]) v`` with v = k, over the window's rows and the entries."""

    def __init__(self, request: SparseAttentionRequest, context: BuildContext) -> None:
        self._request = request

    def write(self, kv: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``kv [T, head_dim]`` at ``layout.slot_mapping``."""
        block = torch.div(layout.slot_mapping, layout.block_size, rounding_mode="floor")
        cache["kv"][block, layout.slot_mapping % layout.block_size] = kv.to(cache["kv"].dtype)

    def plan(self, layout: StepLayout, entry_layout: StepLayout | None = None) -> list[_RequestPlan]:
        """Which rows and entries each request reads, and which of them each of its rows sees."""
        return [self._plan_request(layout, entry_layout, span) for span in spans(layout)]

    def _plan_request(
        self, layout: StepLayout, entry_layout: StepLayout | None, span: tuple[int, int, int, int]
    ) -> _RequestPlan:
        request, start, end, context = span
        r = self._request
        before = r.window if not r.causal else r.window - 1
        # Rows before the first query's window may be gone: they must not be read.
        first = max(0, context - (end - start) - before)
        cached = torch.arange(first, context, device=layout.block_table.device)
        blocks, offsets = token_rows(layout, request, cached)
        position = layout.positions[start:end, None]
        visible = (cached <= position) & (cached > position - r.window)
        if not r.causal:
            visible = torch.ones_like(visible)
        entries = request_entries(entry_layout, r.rate, span) if entry_layout is not None else None
        return _RequestPlan(start, end, blocks, offsets, visible, entries)

    def run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        entries: LayerCache | None,
        plan: list[_RequestPlan],
        sinks: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query [T, heads, head_dim]`` -> the same shape and dtype."""
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for part in plan:
            rows = slice(part.start, part.end)
            keys = cache["kv"][part.blocks, part.offsets]
            visible = part.visible
            if part.entries is not None and entries is not None:
                seen = part.entries.visible
                if chosen is not None:
                    seen = picked(chosen[rows], seen.shape[1])
                keys = torch.cat((keys, entries["kv"][part.entries.blocks, part.entries.offsets]))
                visible = torch.cat((visible, seen), dim=1)
            output[rows] = self._attend(widen(query[rows]), keys, visible, sinks).to(query.dtype)
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        keys = keys.to(query.dtype)
        scores = torch.einsum("qhd,cd->hqc", query, keys) * self._request.scale
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        return torch.einsum("hqc,cd->qhd", weights, keys)


def picked(chosen: torch.Tensor, count: int) -> torch.Tensor:
    """``[q, k]`` ids with -1 for none -> mask ``[q, count]``."""
    mask = torch.zeros((chosen.shape[0], count + 1), dtype=torch.bool, device=chosen.device)
    mask.scatter_(1, torch.where(chosen < 0, count, chosen), True)
    return mask[:, :count]
