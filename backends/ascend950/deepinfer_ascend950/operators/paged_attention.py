"""``attention.paged`` by ``npu_fused_infer_attention_score_v2``.

Relied on (its document): in layout TND the query is ``[T, heads, d]`` and ``actual_seq_qlen`` holds the running total
of query rows of each request; with ``block_table [R, B]`` int32 keys and values are ``[blocks, block_size,
kv_heads * d]`` and ``actual_seq_kvlen`` holds each request's own length. ``sparse_mode=3`` is causal from the lower
right corner and wants the ``[2048, 2048]`` mask whose upper triangle is set. Inputs are float16 or bfloat16, ``d`` is
128 in this layout, ``block_size`` is a multiple of 128 up to 512, at most 64 query heads share a key head, and
``kv_heads * d`` stays below 65,536.

Refused, since the document does not settle them: windows (whether a band counts from the lower right corner when keys
outnumber queries), and sinks (they are float32 here and bfloat16 there).
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout

CAUSAL = 3
MASK_WIDTH = 2048


@attrs.frozen(eq=False)
class _Plan:
    """Of the requests that have rows in the step: running total of rows, own lengths, block table."""

    query_ends: list[int]
    lengths: list[int]
    block_table: torch.Tensor


class PagedAttention:
    """Causal GQA over a paged cache."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._mask = torch.ones((MASK_WIDTH, MASK_WIDTH), dtype=torch.int8, device=context.device).triu_(1)

    def plan(self, layout: StepLayout) -> _Plan:
        """The lengths as the operator wants them: lists on the host."""
        busy = np.flatnonzero(layout.host_query_lens)
        table = layout.block_table
        if len(busy) < len(layout.host_query_lens):
            table = table.index_select(0, torch.from_numpy(busy).to(table.device))
        return _Plan(
            query_ends=np.cumsum(layout.host_query_lens[busy]).tolist(),
            lengths=layout.host_seq_lens[busy].tolist(),
            block_table=table.contiguous(),
        )

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: _Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[T, q_heads, head_dim]`` -> the same shape and dtype, fresh memory."""
        if not len(query):
            return torch.empty_like(query)
        r = self._request
        key, value = (cache[name].flatten(2) for name in ("key", "value"))
        output: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query.contiguous(),
            key,
            value,
            atten_mask=self._mask,
            actual_seq_qlen=plan.query_ends,
            actual_seq_kvlen=plan.lengths,
            block_table=plan.block_table,
            num_query_heads=r.q_heads,
            num_key_value_heads=r.kv_heads,
            softmax_scale=r.scale,
            input_layout="TND",
            sparse_mode=CAUSAL,
            block_size=r.block_size,
        )[0]
        return output
