"""Paged attention and cache writes on the host, float32, reading the cache where it lies.

Rows with few neighbours (decode, drafts) attend in three calls for the whole step, without copying keys or values:
a product sampled at the cache rows each query sees, a softmax, and a weighted sum of the value rows looked up
in place. Prompt chunks gather their request's rows once a layer and use dense attention.
"""

from __future__ import annotations

import warnings

import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout, WriteKVRequest

from .attention_plan import AttentionPlan, Chunk, Gather, make_plan


class WriteKV:
    """Scatters new keys and values into their cache rows."""

    def __init__(self, request: WriteKVRequest, context: BuildContext) -> None:
        self._row = (-1, request.kv_heads, request.head_dim)

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``, and nothing else."""
        cache["key"].view(self._row).index_copy_(0, layout.slot_mapping, key)
        cache["value"].view(self._row).index_copy_(0, layout.slot_mapping, value)


class PagedAttention:
    """``softmax(scale * q k^T) v`` over the visible positions of each row.

    A plan knows cache rows only by number, so it does not depend on the layer.
    """

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        _warn_about_sparse_once()

    def plan(self, layout: StepLayout) -> AttentionPlan:
        """What each row reads, from the host copies of the step's layout."""
        return make_plan(self._request, layout)

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: AttentionPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` float32 -> the same shape, fresh memory."""
        gather = plan.gather
        if gather is not None and gather.rows is None:
            return self._gathered(query, cache, gather)
        output = torch.empty(query.shape)
        if gather is not None and gather.rows is not None:
            output.index_copy_(0, gather.rows, self._gathered(query.index_select(0, gather.rows), cache, gather))
        for chunk in plan.chunks:
            key, value = (self._request_rows(cache[name], chunk) for name in ("key", "value"))
            dense(query, key, value, chunk, self._request.scale, output)
        return output

    def _gathered(self, query: torch.Tensor, cache: LayerCache, gather: Gather) -> torch.Tensor:
        """``[n, q_heads, head_dim]`` -> fresh ``[n, q_heads, head_dim]``."""
        request = self._request
        keys = cache["key"].view(-1, request.head_dim)[: gather.pattern.shape[1]]
        rows = query.reshape(-1, request.head_dim)
        # The pattern's own values are the mask, added to the scaled products.
        scores = torch.sparse.sampled_addmm(gather.pattern, rows, keys.t(), beta=1.0, alpha=request.scale).values()
        weights = _softmax(scores, gather)
        values = cache["value"].view(-1, request.head_dim)
        summed = torch.embedding_bag(values, gather.columns, gather.offsets, False, 0, False, weights)[0]
        return summed.view(query.shape)

    def _request_rows(self, cached: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """One request's visible cache rows, ``[kv_heads, keys, head_dim]``."""
        rows = cached.index_select(0, chunk.blocks).flatten(0, 1)
        return rows[chunk.skip : chunk.skip + chunk.parts[-1].keys].transpose(0, 1)


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: Chunk, scale: float, output: torch.Tensor
) -> None:
    """Attend one request's chunk and write its rows of ``output``; ``key`` and ``value [kv_heads, keys, head_dim]``."""
    for part in chunk.parts:
        rows = slice(part.start, part.end)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None, rows].transpose(1, 2),
            key[None, :, : part.keys],
            value[None, :, : part.keys],
            attn_mask=part.mask,
            is_causal=part.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        output[rows] = attended[0].transpose(0, 1)


def _softmax(scores: torch.Tensor, gather: Gather) -> torch.Tensor:
    """Softmax over every bucket's rows, flat as the scores."""
    if len(gather.buckets) == 1:
        return torch.softmax(scores.view(-1, gather.buckets[0].width), dim=-1).view(-1)
    weights = torch.empty_like(scores)
    for bucket in gather.buckets:
        part = slice(bucket.start, bucket.end)
        torch.softmax(scores[part].view(-1, bucket.width), dim=-1, out=weights[part].view(-1, bucket.width))
    return weights


def _warn_about_sparse_once() -> None:
    """Use up torch's once-a-process remark that CSR tensors are young: nothing here depends on what may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)
