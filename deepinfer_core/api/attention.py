"""Attention: writing the paged KV cache, and attending over it.

Rows are token-major: a step holds ``T`` query rows of ``R`` requests back to back. Every decode
step may carry several rows per request (drafts), so a decode row is a prefill chunk of length q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .kv_layout import LayerCache


@attrs.define(kw_only=True)
class StepLayout:
    """Where the rows of one step lie in one cache group. Built once a step; read-only for operators.

    Device tensors:
        cu_seqlens: ``[R+1]`` int32, row offsets: request r owns rows ``cu_seqlens[r]:cu_seqlens[r+1]``.
        seq_lens: ``[R]`` int32, tokens of context after this step's rows are written.
        positions: ``[T]`` int64, absolute position of each row.
        block_table: ``[R, B]`` int32, block ids by block number; 0 where a request has no block.
        slot_mapping: ``[T]`` int64, ``block * block_size + offset`` of the row each query row writes.

    Host copies, for planning without a device read-back:
        host_query_lens, host_seq_lens: ``[R]`` int32 arrays.
        max_query_len, max_seq_len: their maxima.

    Requests are ordered by query length where the planner can: decode rows come first.
    """

    block_size: int
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    host_query_lens: np.ndarray[Any, Any]
    host_seq_lens: np.ndarray[Any, Any]
    max_query_len: int
    max_seq_len: int


@attrs.frozen(kw_only=True)
class WriteKVRequest(OpRequest):
    """Geometry of the cache rows written; dtypes are torch dtype names.

    A ``cache_dtype`` of ``float8_e4m3fn`` has no scale: values are rounded to the nearest, ties to even, those past
    448 become 448, and NaN stays NaN.

    ``cache_group`` names the group written; the engine adds the demand ``kv_layout:<layout>`` for it.
    """

    op: ClassVar[str] = "attention.write_kv"

    cache_group: str
    kv_heads: int
    head_dim: int
    dtype: str
    cache_dtype: str
    block_size: int

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group,)


class WriteKV(Protocol):
    """Scatter new keys and values into their cache rows."""

    def run(self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``key`` and ``value`` ``[T, kv_heads, head_dim]`` at ``layout.slot_mapping``.

        Writes those rows of ``cache`` and nothing else. Rewriting a row (rejected drafts, replay) is legal.
        T may be 0. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class PagedAttentionRequest(OpRequest):
    """GQA/MQA attention over a paged cache.

    Attributes:
        cache_group: group read; the engine adds the demand ``kv_layout:<layout>`` for the layout chosen for it.
        q_heads, kv_heads: ``q_heads`` is a multiple of ``kv_heads``.
        head_dim: of queries, keys and values.
        dtype: of queries and output. cache_dtype: of the cache.
        scale: multiplies the scores.
        block_size: tokens per block.
        window: tokens a query sees, itself included; None: all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: off.
        sinks: True if ``run`` gets one extra logit per head that only enlarges the denominator.
        causal: False: each row sees every cached position of its request, rows of this step after it included (drafts
            made in parallel). Adds the demand ``block_attention``, and goes without a window.
    """

    op: ClassVar[str] = "attention.paged"

    cache_group: str
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    cache_dtype: str
    scale: float
    block_size: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.causal:
            if self.window is not None:
                raise ValueError("causal=False goes without a window")
            object.__setattr__(self, "demands", self.demands | {"block_attention"})

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group,)


class PagedAttention(Protocol):
    """Causal attention of a step's rows over their cached context."""

    def plan(self, layout: StepLayout) -> Any:
        """Host-side preparation, once a step, shared by all layers of the group.

        Captured from operators with the cap ``graph_capture`` (see :class:`~deepinfer_core.api.CapturesGraphs`).
        """
        ...

    def run(self, query: torch.Tensor, cache: LayerCache, plan: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend, once a layer.

        Args:
            query: ``[T, q_heads, head_dim]``.
            cache: the layer's cache, with this step's keys and values already written.
            plan: what :meth:`plan` returned for this step.
            sinks: ``[q_heads]`` float32, iff the request said so.

        Returns:
            ``[T, q_heads, head_dim]`` in the query's dtype, fresh memory. The row at position t sees cached
            positions ``max(0, t - window + 1) .. t``, or all of its request unless causal. Softmax in float32 or
            better. T may be 0. Capturable.
        """
        ...
