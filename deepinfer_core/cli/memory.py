"""What a model needs of memory, from its description: weights, and cache for a context and a batch."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import attrs
import torch

from deepinfer_core.api import CacheGroupSpec, ModelSpec, TensorInfo, TensorSpec, WeightSource

if TYPE_CHECKING:
    from deepinfer_core.engine.planning import PlannedEngine

KEEPS_PACKED = "packed_weights"
"""Cap of a provider that keeps packed weights as they are stored."""
QUANTISED = ("fp8:", "fp4:")
SCALES = "float8_e8m0fnu"


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


def weight_bytes(spec: ModelSpec, weights: WeightSource, packed: Container[str] = ()) -> int:
    """Bytes of the tensors the model loads.

    A tensor takes its elements in the type its operator computes in; integers, which are tables, keep their own.
    Weights stored in a packed format (``weight_dtype`` of a request) stay as they are if their slot is in ``packed``.
    """
    present = set(weights.names())
    return sum(
        _kept_bytes(spec, tensor, weights.describe(name), packed)
        for name, tensor in spec.tensors.items()
        if tensor.loaded and name in present
    )


def packed_slots(planned: PlannedEngine) -> frozenset[str]:
    """Slots whose provider keeps packed weights as they are stored."""
    caps = {(provider.op, f"{plugin}:{provider.name}"): provider.caps for plugin, provider in planned.providers}
    choices = planned.plan.choices
    return frozenset(c.slot for c in choices if KEEPS_PACKED in caps.get((c.op, c.provider), ()))


def _kept_bytes(spec: ModelSpec, tensor: TensorSpec, stored: TensorInfo, packed: Container[str]) -> int:
    request: Any = spec.ops.get(tensor.slot)
    elements = math.prod(tensor.shape)
    stored_format = getattr(request, "weight_dtype", "")
    if stored_format.startswith(QUANTISED):
        if tensor.slot in packed:
            return stored.num_bytes
        if stored.dtype == SCALES:
            return 0
        # Two elements lie in a byte of fp4.
        return elements * (2 if stored_format.startswith("fp4:") else 1) * _item_size(request.dtype)
    found = getattr(torch, stored.dtype, None)
    if isinstance(found, torch.dtype) and not (found.is_floating_point or found.is_complex):
        return elements * found.itemsize
    return elements * _item_size(getattr(request, "dtype", spec.dtype))


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
