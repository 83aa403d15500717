"""Paged attention on the host over the layout ``transposed_keys``, float32.

Rows of prompts attend by products over tiles, as in :mod:`.attention`, after their blocks were gathered. Decode rows
and drafts read the cache where it lies: sums over key channels and over values add the same numbers in the same order
as those products do, which is tried when the operator is built. Where they do not, these rows gather as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout

from .attention import PagedAttention, Plan
from .attention_check import check_channels
from .attention_tiles import Runs, Span, prompts_of
from .channel_lists import Group, KnownLists


@attrs.frozen(eq=False)
class TransposedPlan(Plan):
    """``groups``: rows that read the cache where it lies."""

    groups: tuple[Group, ...]


class TransposedPagedAttention(PagedAttention):
    """``softmax(scale * q k^T) v``; ``key [blocks, kv_heads, head_dim, block_size]``, ``value [blocks, kv_heads,
    block_size, head_dim]``. Serves one step at a time.
    """

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._lists = KnownLists(request)
        super().__init__(request, context)

    def _tried(self, num_threads: int) -> bool:
        r = self._request
        return super()._tried(num_threads) and check_channels(r.head_dim, r.block_size, num_threads)

    def _forget(self) -> None:
        super()._forget()
        self._lists.forget()

    def arranged(self, cache: LayerCache) -> LayerCache:
        """``key`` and ``value [blocks, block_size, kv_heads, head_dim]`` in this operator's layout."""
        return {
            "key": cache["key"].permute(0, 2, 3, 1).contiguous(),
            "value": cache["value"].transpose(1, 2).contiguous(),
        }

    def plan(self, layout: StepLayout) -> Plan:
        """What each row reads, from the host copies of the step's layout."""
        plan = super().plan(layout)
        groups = self._lists.groups(layout, plan.runs) if self._in_place else ()
        return TransposedPlan(plan.layout, plan.runs, plan.spans, groups)

    def _spans(self, layout: StepLayout, runs: Runs) -> Iterator[Span]:
        return prompts_of(self._request, layout, runs) if self._in_place else super()._spans(layout, runs)

    def _attend(self, query: torch.Tensor, cache: LayerCache, plan: Plan, output: torch.Tensor) -> None:
        assert isinstance(plan, TransposedPlan)
        for group in plan.groups:
            output.index_copy_(0, group.rows, self._read(query.index_select(0, group.rows), cache, group))
        super()._attend(query, cache, plan, output)

    def _read(self, query: torch.Tensor, cache: LayerCache, group: Group) -> torch.Tensor:
        """``[n, q_heads, head_dim]`` -> the same shape, fresh memory."""
        r, lists, bag = self._request, group.lists, torch._embedding_bag_forward_only
        channels, values = cache["key"].view(-1, r.block_size), cache["value"].view(-1, r.head_dim)
        torch.mul(query.unsqueeze(2).expand(lists.scaled.shape), r.scale, out=lists.scaled)
        products = bag(channels, lists.keys, lists.key_bags, False, 0, False, lists.scaled.view(-1))[0]
        scores = products.view(query.shape[0], r.q_heads, -1)
        if scores.shape[2] != group.width:
            scores = scores.narrow(2, group.skip, group.width).contiguous()
        if group.seen < group.width:
            scores[..., group.seen :].masked_fill_(group.hidden, float("-inf"))
        weights = torch.softmax(scores, -1).view(-1)
        sums = bag(values, group.values, group.value_bags, False, 0, False, weights)[0]
        blocks = sums.view(*query.shape[:2], -1, r.head_dim)
        total = blocks[:, :, 0]
        for number in range(1, blocks.shape[2]):
            total = total + blocks[:, :, number]
        return total

    def _gathered(self, cache: LayerCache, name: str, span: Span) -> torch.Tensor:
        """``[R, kv_heads, columns, head_dim]``, or heads first if the span goes by them; keys lie by channel."""
        r, rows = self._request, cache[name]
        found = self._room(f"{name} blocks", len(span.blocks), *rows.shape[1:])
        torch.index_select(rows, 0, span.blocks, out=found)
        blocks = found.view(span.requests, -1, *rows.shape[1:])
        blocks = blocks.permute((2, 0, 3, 1, 4) if name == "key" else (2, 0, 1, 3, 4))
        blocks = blocks if span.by_head else blocks.transpose(0, 1)
        room = self._room(name, *blocks.shape)
        room.copy_(blocks)
        if name == "key":
            return room.view(*blocks.shape[:2], r.head_dim, -1)[..., span.skip :].transpose(2, 3)
        return room.view(*blocks.shape[:2], -1, r.head_dim)[:, :, span.skip :]
