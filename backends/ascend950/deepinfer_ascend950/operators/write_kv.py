"""``attention.write_kv`` by ``npu_scatter_pa_kv_cache``.

Relied on (document ``npu_scatter_pa_kv_cache``, second scene): with ``cache_mode="Norm"``, keys and values
``[T, heads, d]`` go to rows ``slot_mapping [T]`` of caches ``[blocks, block_size, heads, d]``, all of one dtype and
contiguous. Slots must differ, else those rows are undefined: rows of padding all write the null block, which nobody
reads.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import BuildContext, LayerCache, StepLayout, WriteKVRequest


class WriteKV:
    """Scatters new keys and values into their cache rows."""

    def __init__(self, request: WriteKVRequest, context: BuildContext) -> None:
        pass

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``, and nothing else."""
        if not len(key):
            return
        torch.ops.npu.npu_scatter_pa_kv_cache(
            key.contiguous(), value.contiguous(), cache["key"], cache["value"], layout.slot_mapping, cache_mode="Norm"
        )
