"""Paged attention and cache writes over the layout ``transposed_keys``, float32.

Decode rows and drafts attend in three calls a layer, whatever their number: products of queries and keys as sums of
key channels, a softmax, and sums of values, all of them reading the cache where it lies. Prompt chunks gather their
request's blocks once a layer and use dense attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout, WriteKVRequest

from .attention import dense
from .attention_plan import Chunk, chunks_of, few_rows
from .transposed_plan import Bucket, KnownLists, make_buckets

Array = np.ndarray[Any, Any]
V = TypeVar("V")

LAYOUT = "transposed_keys"


MINUS_INFINITY = torch.tensor(float("-inf"))

MOST_VIEWS = 1024


class LayerViews(Generic[V]):
    """What ``make`` gives for a layer's cache, made when it is first asked for: layers keep their caches."""

    def __init__(self, make: Callable[[LayerCache], V]) -> None:
        self._make = make
        self._known: dict[int, tuple[LayerCache, V]] = {}

    def of(self, cache: LayerCache) -> V:
        known = self._known.get(id(cache))
        if known is None or known[0] is not cache:
            if len(self._known) == MOST_VIEWS:
                self._known.clear()
            known = self._known[id(cache)] = (cache, self._make(cache))
        return known[1]


class WriteKV:
    """Scatters new keys and values into their places."""

    def __init__(self, request: WriteKVRequest, context: BuildContext) -> None:
        self._size = request.block_size
        self._mapping: torch.Tensor | None = None
        self._places: tuple[Any, Any] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._views = LayerViews(lambda cache: (cache["key"].numpy(), cache["value"].numpy()))

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``, and nothing else."""
        self.put(key.numpy(), value.numpy(), cache, layout)

    def put(self, key: Array, value: Array, cache: LayerCache, layout: StepLayout) -> None:
        """:meth:`run` for arrays."""
        if layout.slot_mapping is not self._mapping:  # once a step: its layers share the layout
            self._mapping = layout.slot_mapping
            self._places = np.divmod(layout.slot_mapping.numpy(), self._size)
        blocks, offsets = self._places
        keys, values = self._views.of(cache)
        if len(blocks) == 1:
            block, offset = blocks[0], offsets[0]
            keys[block, :, :, offset] = key[0]
            values[block, :, offset] = value[0]
        else:
            keys[blocks, :, :, offsets] = key
            values[blocks, :, offsets] = value


@attrs.frozen(eq=False)
class Plan:
    """What the rows of a step read."""

    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]


class PagedAttention:
    """``softmax(scale * q k^T) v`` over the visible positions of each row. Serves one step at a time."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._lists = KnownLists(request)
        shapes = ((-1, request.block_size), (-1, request.head_dim))
        self._vectors = LayerViews(lambda cache: (cache["key"].view(shapes[0]), cache["value"].view(shapes[1])))

    def plan(self, layout: StepLayout) -> Plan:
        """What each row reads, from the host copies of the step's layout."""
        few = few_rows(layout)
        table = layout.block_table.numpy()
        gathers = bool(layout.host_query_lens[few].any())
        buckets = make_buckets(self._request, layout, table, few, self._lists) if gathers else ()
        return Plan(buckets, chunks_of(self._request, layout, table, few))

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` float32 -> the same shape, fresh memory."""
        if len(plan.buckets) == 1 and plan.buckets[0].rows is None:
            return self._gathered(query, cache, plan.buckets[0])
        output = torch.empty(query.shape)
        for bucket in plan.buckets:
            assert bucket.rows is not None
            output.index_copy_(0, bucket.rows, self._gathered(query.index_select(0, bucket.rows), cache, bucket))
        for chunk in plan.chunks:
            dense(query, *self._request_rows(cache, chunk), chunk, self._request.scale, output)
        return output

    def _gathered(self, query: torch.Tensor, cache: LayerCache, bucket: Bucket) -> torch.Tensor:
        """``[n, q_heads, head_dim]`` -> fresh ``[n, q_heads, head_dim]``."""
        channels, values = self._vectors.of(cache)
        bag = torch._embedding_bag_forward_only
        torch.mul(query.unsqueeze(2), bucket.scale, out=bucket.scaled)
        products = bag(channels, bucket.keys, bucket.key_bags, False, 0, False, bucket.flat)[0]
        scores = products.view(query.shape[0], self._request.q_heads, -1)
        if bucket.hidden is not None:
            scores.narrow(2, bucket.seen, bucket.hidden.shape[2]).masked_fill_(bucket.hidden, MINUS_INFINITY)
        weights = torch.softmax(scores, -1).view(-1)
        return bag(values, bucket.values, bucket.value_bags, False, 0, False, weights)[0].view(query.shape)

    def _request_rows(self, cache: LayerCache, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """One request's visible keys and values, each ``[kv_heads, keys, head_dim]``."""
        end = chunk.skip + chunk.parts[-1].keys
        keys = cache["key"].index_select(0, chunk.blocks).permute(1, 0, 3, 2).flatten(1, 2)
        values = cache["value"].index_select(0, chunk.blocks).transpose(0, 1).flatten(1, 2)
        return keys[:, chunk.skip : end], values[:, chunk.skip : end]
