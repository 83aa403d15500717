"""Which vectors of the cache every decode row reads in the layout ``transposed_keys``, once for all layers.

A row's products with one block's keys are a weighted sum of the block's channels, its output a weighted sum of values:
both are lists of cache vectors, one list for each row, head and block, or for each row and head. Rows that see a
similar number of blocks share a bucket, padded to the most of them, so that softmax runs over plain matrices. Positions
that a row does not see are hidden from its products, and stand for its own first position among its values: no row ever
adds up what belongs to another request.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import PagedAttentionRequest, StepLayout

Array = np.ndarray[Any, Any]


@attrs.frozen(eq=False)
class Bucket:
    """``n`` query rows, of which each reads ``b`` blocks.

    Attributes:
        rows: ``[n]`` int64, their numbers in the step; None when they are all rows in order.
        keys: ``[n * heads * b * head_dim]`` vectors of the keys as ``[-1, block_size]``; key_bags: where those of each
            row, head and block begin.
        values: ``[n * heads * b * block_size]`` vectors of the values as ``[-1, head_dim]``; value_bags: where those of
            each row and head begin.
        hidden: ``[n, 1, b * block_size - seen]`` bool, the positions past the first ``seen`` that a row does not see;
            None if every row sees all.
        scale: ``[b, 1]`` float32, of queries.
        scaled: ``[n, heads, b, head_dim]`` float32 to put scaled queries into, used anew in each layer; flat: the same
            memory.
    """

    rows: torch.Tensor | None
    keys: torch.Tensor
    key_bags: torch.Tensor
    values: torch.Tensor
    value_bags: torch.Tensor
    hidden: torch.Tensor | None
    seen: int
    scale: torch.Tensor
    scaled: torch.Tensor
    flat: torch.Tensor


@attrs.frozen(eq=False)
class Lists:
    """What is the same for all steps in which ``n`` rows see the same ``b`` blocks each; fields as in :class:`Bucket`.

    Attributes:
        values: ``[n, heads, b * block_size]``, as if every row saw all positions.
    """

    keys: torch.Tensor
    key_bags: torch.Tensor
    values: Array
    value_bags: torch.Tensor
    scale: torch.Tensor
    scaled: torch.Tensor
    flat: torch.Tensor


class KnownLists:
    """The lists of the last step: while a batch decodes, most steps read the blocks that the step before read."""

    def __init__(self, request: PagedAttentionRequest) -> None:
        self._request = request
        self._last: dict[tuple[int, bytes], Lists] = {}
        self._now: dict[tuple[int, bytes], Lists] = {}

    def begin(self) -> None:
        """A step begins; lists that it does not ask for are dropped."""
        self._last, self._now = self._now, {}

    def of(self, blocks: Array) -> Lists:
        """The lists of ``blocks [n, b]``."""
        key = (blocks.shape[1], blocks.tobytes())
        lists = self._last.get(key)
        if lists is None:
            lists = _lists(self._request, blocks)
        self._now[key] = lists
        return lists


def make_buckets(
    request: PagedAttentionRequest, layout: StepLayout, table: Array, few: Array, known: KnownLists
) -> tuple[Bucket, ...]:
    """The query rows of the requests ``few [R]`` bool, ``table [R, B]``, divided by how many blocks they see."""
    known.begin()
    size = layout.block_size
    owners = np.repeat(np.arange(len(few)), layout.host_query_lens)
    rows = few[owners].nonzero()[0]
    everyone = len(rows) == len(owners)
    owners, last = owners[rows], layout.positions.numpy()[rows]
    if not request.causal:
        last = layout.host_seq_lens[owners].astype(np.int64) - 1
    first = np.zeros_like(last) if request.window is None else np.maximum(last - request.window + 1, 0)
    counts = last // size - first // size + 1
    most = int(counts.max())
    if _fits(int(counts.min()), most):
        return (_bucket(request, table, owners, first, last, most, None if everyone else rows, known),)
    order = np.argsort(-counts, kind="stable")
    buckets, begin, ordered = [], 0, counts[order].tolist()
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or not _fits(ordered[end], ordered[begin]):
            part = order[begin:end]
            shape = owners[part], first[part], last[part]
            buckets.append(_bucket(request, table, *shape, ordered[begin], rows[part], known))
            begin = end
    return tuple(buckets)


def _fits(blocks: int, most: int) -> bool:
    """A row may be padded by a quarter and by a block, about what another bucket's calls would cost."""
    return blocks * 5 >= (most - 1) * 4


def _bucket(
    request: PagedAttentionRequest,
    table: Array,
    owners: Array,
    first: Array,
    last: Array,
    width: int,
    rows: Array | None,
    known: KnownLists,
) -> Bucket:
    size, n, start = request.block_size, len(owners), first // request.block_size
    numbers = start[:, None] + np.arange(width)
    lists = known.of(table[owners[:, None], np.minimum(numbers, (last // size)[:, None])])
    values = lists.values
    offset = first - start * size
    seen = 0 if offset.any() else int((last - start * size).min()) + 1
    hidden = None
    if seen < width * size:
        position = (start * size)[:, None] + np.arange(seen, width * size)
        unseen = (position > last[:, None]) | (position < first[:, None])
        values = values.copy()
        own = values[np.arange(n), :, offset]
        np.copyto(values[:, :, seen:], own[:, :, None], where=unseen[:, None])
        hidden = torch.from_numpy(unseen[:, None])
    return Bucket(
        rows=None if rows is None else torch.from_numpy(rows),
        keys=lists.keys,
        key_bags=lists.key_bags,
        values=torch.from_numpy(values.reshape(-1)),
        value_bags=lists.value_bags,
        hidden=hidden,
        seen=seen,
        scale=lists.scale,
        scaled=lists.scaled,
        flat=lists.flat,
    )


def _lists(request: PagedAttentionRequest, blocks: Array) -> Lists:
    size, heads, dim = request.block_size, request.q_heads, request.head_dim
    kv_heads, (n, width) = request.kv_heads, blocks.shape
    index: Any = np.int32 if (int(blocks.max()) + 1) * kv_heads * max(size, dim) < 2**31 else np.int64
    first_heads = (blocks.astype(index) * index(kv_heads))[:, None, :, None]
    keys = first_heads * index(dim) + _vectors(heads, kv_heads, dim, index)
    values = (first_heads * index(size) + _vectors(heads, kv_heads, size, index)).reshape(n, heads, width * size)
    with torch.inference_mode(False):  # it outlives the step that asks for it
        scaled = torch.empty(n, heads, width, dim)
    return Lists(
        keys=torch.from_numpy(keys.reshape(-1)),
        key_bags=_bags(n * heads * width, dim, index),
        values=values,
        value_bags=_bags(n * heads, width * size, index),
        scale=torch.full((width, 1), request.scale),
        scaled=scaled,
        flat=scaled.view(-1),
    )


@lru_cache(maxsize=16)
def _vectors(heads: int, kv_heads: int, width: int, index: Any) -> Array:
    """``[heads, 1, width]``: where the ``width`` vectors that a query head reads lie in a block."""
    kv_head = np.arange(heads, dtype=index) // (heads // kv_heads)
    vectors: Array = (kv_head[:, None] * index(width) + np.arange(width, dtype=index))[:, None]
    return vectors


@lru_cache(maxsize=64)
def _bags(count: int, length: int, index: Any) -> torch.Tensor:
    """Where each of ``count`` bags of ``length`` vectors begins; steps ask for the same again and again."""
    return torch.from_numpy(np.arange(0, count * length, length, dtype=index))
