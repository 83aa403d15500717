"""What a model needs of memory, from its description: weights, and cache for a context and a batch."""

from __future__ import annotations

import math

import attrs
import torch

from deepinfer_core.api import CacheGroupSpec, ModelSpec, WeightSource


@attrs.frozen(kw_only=True)
class CacheNeed:
    """Cache of one group.

    Attributes:
        bytes_per_token: over all layers of the group, for each token that is kept.
        tokens: most tokens kept for one request; a window's need no more than it spans, in whole blocks.
        blocks: for all requests together. num_bytes: of these blocks.
    """

    group: str
    kind: str
    layers: int
    bytes_per_token: float
    tokens: int
    blocks: int
    num_bytes: int


def cache_needs(spec: ModelSpec, *, block_size: int, context: int, batch: int) -> list[CacheNeed]:
    """Cache of ``batch`` requests of ``context`` tokens each, with nothing shared between them."""
    return [_need(group, block_size, context, batch) for group in spec.cache_groups]


def weight_bytes(spec: ModelSpec, weights: WeightSource) -> int:
    """Bytes of the tensors the model reads, in its compute type."""
    present = set(weights.names())
    elements = sum(math.prod(tensor.shape) for name, tensor in spec.tensors.items() if name in present)
    return elements * _item_size(spec.dtype)


def _need(group: CacheGroupSpec, block_size: int, context: int, batch: int) -> CacheNeed:
    row = group.layers * sum(math.prod(entry.shape) * _item_size(entry.dtype) for entry in group.entries)
    blocks = math.ceil(context / block_size)
    if group.window is not None:
        # A window that does not begin at a block's edge reaches into one block more.
        blocks = min(blocks, math.ceil((group.window - 1) / block_size) + 1)
    return CacheNeed(
        group=group.name,
        kind=group.kind,
        layers=group.layers,
        bytes_per_token=row / group.tokens_per_row,
        tokens=min(context, blocks * block_size),
        blocks=blocks * batch,
        num_bytes=blocks * batch * row * block_size // group.tokens_per_row,
    )


def _item_size(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize
