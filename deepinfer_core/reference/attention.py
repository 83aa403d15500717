"""Paged attention, one request at a time, in float32 or float64.

A layer's cache holds the entries ``"key"`` and ``"value"``, each ``[num_blocks, block_size, kv_heads, head_dim]``.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout, WriteKVRequest

from .dtypes import narrow, widen


class WriteKV:
    """Scatters new keys and values into their cache rows."""

    def __init__(self, request: WriteKVRequest, context: BuildContext) -> None:
        pass

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``, and nothing else."""
        block = torch.div(layout.slot_mapping, layout.block_size, rounding_mode="floor")
        offset = layout.slot_mapping % layout.block_size
        cache["key"][block, offset] = narrow(key, cache["key"].dtype)
        cache["value"][block, offset] = narrow(value, cache["value"].dtype)


@attrs.frozen
class _RequestPlan:
    """Rows ``start:end`` of the step attend to the cached rows ``(blocks, offsets)`` where ``visible [q, c]``."""

    start: int
    end: int
    blocks: torch.Tensor
    offsets: torch.Tensor
    visible: torch.Tensor


class Paged:
    """``softmax(scale * q k^T) v`` over the visible positions of each row."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request

    def plan(self, layout: StepLayout) -> list[_RequestPlan]:
        """Which cached rows each request reads, and which of them each of its rows sees."""
        plans = []
        start = 0
        for index, (length, context) in enumerate(
            zip(layout.host_query_lens.tolist(), layout.host_seq_lens.tolist(), strict=True)
        ):
            if length:
                plans.append(self._plan_request(layout, index, start, start + length, context))
            start += length
        return plans

    def _plan_request(self, layout: StepLayout, index: int, start: int, end: int, context: int) -> _RequestPlan:
        window = self._request.window
        # Blocks that slid out of the window are gone: rows before the first one's window must not be read.
        first = 0 if window is None else max(0, context - (end - start) - window + 1)
        cached = torch.arange(first, context, device=layout.block_table.device)
        number = torch.div(cached, layout.block_size, rounding_mode="floor")
        blocks = layout.block_table[index].to(torch.int64)[number]
        position = layout.positions[start:end, None]
        visible = cached <= position
        if not self._request.causal:
            visible = torch.ones_like(visible)
        if window is not None:
            visible &= cached > position - window
        return _RequestPlan(start, end, blocks, cached % layout.block_size, visible)

    def run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        plan: list[_RequestPlan],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` -> the same shape and dtype."""
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for part in plan:
            rows = slice(part.start, part.end)
            output[rows] = self._attend(widen(query[rows]), cache, part, sinks).to(query.dtype)
        return output

    def _attend(
        self, query: torch.Tensor, cache: LayerCache, part: _RequestPlan, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        request = self._request
        rows = query.shape[0]
        key = cache["key"][part.blocks, part.offsets].to(query.dtype)
        value = cache["value"][part.blocks, part.offsets].to(query.dtype)
        # Query heads that share a key head lie together: [q, kv_heads, group, d].
        grouped = query.reshape(rows, request.kv_heads, -1, request.head_dim)
        scores = torch.einsum("qhgd,chd->hgqc", grouped, key) * request.scale
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        scores = scores.masked_fill(~part.visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype).view(request.kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
        return torch.einsum("hgqc,chd->qhgd", weights, value).reshape(rows, request.q_heads, request.head_dim)
