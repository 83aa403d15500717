"""KV layout: how a cache group's blocks lie in memory. The attention provider's decision.

A *cache group* is one kind of per-token state (full KV, window KV, ...). All its layers share
block tables. A layout turns the group's entries into one cache per layer. The layout is chosen first,
by score; requests that touch the group then demand ``"kv_layout:<name of the layout's provider>"``, which
attention providers declare among their caps. A backend with a layout of its own ships both. Where some request of
the group finds no provider in a layout, the next layout is taken, unless the user named the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch

LayerCache = Mapping[str, "torch.Tensor"]
"""Entry name -> tensor. In layout ``paged``: ``[num_blocks, rows_per_block, *entry.shape]``."""


@attrs.frozen
class CacheEntry:
    """One tensor kept per cached row. ``shape`` excludes block and row; ``dtype`` is a torch dtype's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class CacheGroupSpec:
    """One kind of paged state, declared by the model.

    Attributes:
        name: key of the group in ``StepLayout`` and cache mappings.
        kind: ``full`` keeps every token's row; ``window`` needs only the last ``window`` tokens, so
            blocks that slid out are freed.
        layers: how many layers own a cache in this group.
        entries: tensors kept for each row of each layer.
        tokens_per_row: tokens that one cached row stands for (1, or a compression rate); divides block_size.
        window: tokens a query may look back, itself included; required for ``window``.
    """

    name: str
    kind: Literal["full", "window"] = "full"
    layers: int
    entries: tuple[CacheEntry, ...]
    tokens_per_row: int = 1
    window: int | None = None

    def __attrs_post_init__(self) -> None:
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(f"cache group {self.name!r}: 'window' goes with kind='window' and only with it")


@attrs.frozen(kw_only=True)
class KVLayoutRequest(OpRequest):
    """Asks for the memory layout of one cache group. ``block_size`` is in tokens."""

    op: ClassVar[str] = "kv_layout.paged"

    group: CacheGroupSpec
    block_size: int


class KVLayout(Protocol):
    """Memory of one cache group."""

    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        ...

    def allocate(self, num_blocks: int) -> list[LayerCache]:
        """One cache per layer, zero-filled. Block 0 is the null block: written by padding, never read."""
        ...
