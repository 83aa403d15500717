"""``kv_layout.paged``: the reference's layout, whose rows of one head lie a whole token apart."""

from __future__ import annotations

from deepinfer_core.api import BuildContext, KVLayout, KVLayoutRequest


def paged_layout(request: KVLayoutRequest, context: BuildContext) -> KVLayout:
    """``[num_blocks, block_size, kv_heads, head_dim]`` for each entry and layer, in the device's memory."""
    layout: KVLayout = context.reference(request)
    return layout
