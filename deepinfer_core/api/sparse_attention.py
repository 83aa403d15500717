"""Compressed sparse attention: a window of raw rows, pooled entries, and the choice among them.

One vector per token serves as key and value of all heads. Beside the window, a query sees *entries*, each
pooled from ``rate`` tokens; an entry is visible once its last token is: entry e to position t iff
``e < (t + 1) // rate``. Three operators share the work: ``compress`` pools, ``index_topk`` chooses, ``sparse``
attends (DeepSeek-V4's CSA and HCA).

Entries of one request lie in a group with ``tokens_per_row = rate`` under the same block numbering as tokens, and
``rate`` divides ``block_size``. With ``n = block_size / rate``, entry e is row ``e % n`` of block number ``e // n``;
the entry closed by the token at slot s is row ``s // rate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .pointwise import RmsNormRequest, RopeRequest
from .provider import OpRequest
from .quantise import QuantiseDequantiseRequest

if TYPE_CHECKING:
    import torch

    from .attention import StepLayout
    from .kv_layout import LayerCache


@attrs.frozen(kw_only=True)
class SparseAttentionRequest(OpRequest):
    """Attention over a window and chosen entries, with one shared vector per row as key and value.

    Attributes:
        cache_group: window rows, entry ``"kv"`` of ``[head_dim]``.
        entry_group: pooled entries, entry ``"kv"`` of ``[head_dim]``; ``""`` when there are none.
        heads, head_dim: of queries.
        dtype: of queries and output. cache_dtype: of both groups.
        scale: multiplies the scores.
        block_size: tokens per block.
        window: tokens a query sees, itself included.
        rate: tokens of one entry; 0 without entries.
        chosen: ids per query that ``run`` gets; 0: a query attends to every visible entry.
        causal: False: the rows of one request form a block, and each sees all of them and the ``window``
            positions before the first (drafts made in parallel).
    """

    op: ClassVar[str] = "attention.sparse"

    cache_group: str
    entry_group: str = ""
    heads: int
    head_dim: int
    dtype: str
    cache_dtype: str
    scale: float
    block_size: int
    window: int
    rate: int = 0
    chosen: int = 0
    causal: bool = True

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group, self.entry_group) if self.entry_group else (self.cache_group,)


class SparseAttention(Protocol):
    """Attention with a sink: one extra logit per head that only enlarges the denominator."""

    def write(self, kv: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """Write ``kv [T, head_dim]`` at the window group's ``layout.slot_mapping``, and nothing else.

        Rewriting a row is legal. T may be 0. Capturable.
        """
        ...

    def plan(self, layout: StepLayout, entry_layout: StepLayout | None = None) -> Any:
        """Host-side preparation, once a step, shared by the layers of one kind. Not captured.

        ``layout`` is the window group's; ``entry_layout`` the entry group's, iff the request names one.
        """
        ...

    def run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        entries: LayerCache | None,
        plan: Any,
        sinks: torch.Tensor,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, once a layer.

        Args:
            query: ``[T, heads, head_dim]``.
            cache, entries: the layer's caches, this step's rows and entries already written.
            plan: what :meth:`plan` returned for this step.
            sinks: ``[heads]`` float32.
            chosen: ``[T, request.chosen]`` int64 entry ids, visible ones only, ascending, -1 last; iff asked for.

        Returns:
            ``[T, heads, head_dim]`` in the query's dtype, fresh memory. Raw rows and entries may cover the same
            tokens; both count. Softmax in float32 or better. T may be 0. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class IndexTopKRequest(OpRequest):
    """Chooses entries by the lightning indexer's score ``sum_h relu(<q_h, key>) * w_h * scale``.

    Attributes:
        cache_group: index keys, entry ``"key"`` of ``[head_dim]``, one row for ``rate`` tokens.
        heads, head_dim: of index queries.
        top_k: entries chosen at most.
        scale: multiplies the weights; the order does not depend on it, the tie of a score with 0 does not either.
        block_size: tokens per block.
    """

    op: ClassVar[str] = "attention.index_topk"

    cache_group: str
    heads: int
    head_dim: int
    top_k: int
    rate: int
    dtype: str
    cache_dtype: str
    scale: float
    block_size: int

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group,)


class IndexTopK(Protocol):
    """Top entries of every query."""

    def plan(self, layout: StepLayout) -> Any:
        """Host-side preparation, once a step."""
        ...

    def run(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        """Score the visible entries and choose.

        Args:
            query: ``[T, heads, head_dim]``, rotated like the keys.
            weights: ``[T, heads]`` float32, may be negative.
            cache: the layer's index keys, this step's already written.

        Returns:
            ``[T, top_k]`` int64: visible entries by score descending, then id ascending; stored ascending, -1 last.
            Scores in float32 or better; a NaN score loses to every other. T may be 0. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class CompressRequest(OpRequest):
    """Pools ``rate`` tokens into one entry, whatever the chunks the tokens arrive in.

    A token contributes a value and a score per channel. Entry w is ``sum_j softmax_j(score_j) * value_j`` per channel
    over its window, tokens ``rate*w .. rate*w + rate - 1``; it is cast to ``dtype``, normed, rotated at position
    ``rate*w``, optionally quantised and dequantised, and written.
    With ``overlap`` a token yields two series: channels ``[0:head_dim]`` (A) count in the *next* window, channels
    ``[head_dim:]`` (B) in its own; entry w pools A of window w-1 (absent for w = 0) and B of window w.

    Attributes:
        cache_group: tail rows, one per token: float32 entries ``"value"`` and ``"score"`` of
            ``[width]`` with ``width = head_dim * (2 if overlap else 1)``. The group is a window of at least
            ``rate`` tokens, ``2 * rate`` with overlap.
        entry_group: entries, one row for ``rate`` tokens. entry: name of the entry written.
        dtype: of the pooled entry before its norm. cache_dtype: of the entry group.
        eps: of the norm.
        rotary_dim, theta, scaling, max_positions: as in RopeRequest, on the *last* channels, pairs interleaved.
        qdq: ``""``, or the format of :class:`QuantiseDequantiseRequest`; with qdq_channels, qdq_group, hadamard.
        block_size: tokens per block.
    """

    op: ClassVar[str] = "attention.compress"

    cache_group: str
    entry_group: str
    entry: str
    head_dim: int
    rate: int
    overlap: bool
    dtype: str
    cache_dtype: str
    eps: float
    rotary_dim: int
    theta: float
    scaling: Mapping[str, Any] = attrs.field(factory=dict)
    max_positions: int
    qdq: str = ""
    qdq_channels: int = 0
    qdq_group: int = 0
    hadamard: bool = False
    block_size: int

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group, self.entry_group)

    @property
    def entry_norm(self) -> RmsNormRequest:
        """What norms a pooled entry, without demands as all parts here."""
        return RmsNormRequest(hidden=self.head_dim, eps=self.eps, dtype=self.dtype, device_type=self.device_type)

    @property
    def rope(self) -> RopeRequest:
        """What turns it."""
        return RopeRequest(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            theta=self.theta,
            dtype=self.dtype,
            max_positions=self.max_positions,
            interleaved=True,
            trailing=True,
            scaling=self.scaling,
            device_type=self.device_type,
        )

    @property
    def rounding(self) -> QuantiseDequantiseRequest | None:
        """What rounds it; None without ``qdq``."""
        if not self.qdq:
            return None
        return QuantiseDequantiseRequest(
            format="fp8:e4m3" if self.qdq == "fp8:e4m3" else "fp4:e2m1",
            width=self.head_dim,
            channels=self.qdq_channels,
            group=self.qdq_group,
            dtype=self.dtype,
            hadamard=self.hadamard,
            device_type=self.device_type,
        )


class Compress(Protocol):
    """Incremental pooling over paged state: nothing is kept but rows in the caches."""

    def plan(self, tail_layout: StepLayout, entry_layout: StepLayout) -> Any:
        """Host-side preparation, once a step: which windows close in it, and where their rows lie."""
        ...

    def run(
        self,
        value: torch.Tensor,
        gate: torch.Tensor,
        tail: LayerCache,
        entries: LayerCache,
        plan: Any,
        position_bias: torch.Tensor,
        norm: torch.Tensor,
    ) -> None:
        """Write the step's tail rows, then every entry whose last token is in the step.

        Rows of earlier tokens are read through the block table, so a step that rewrites nothing (its slots point
        to the null block) still sees the rows that are there.

        Args:
            value, gate: ``[T, width]`` float32.
            tail, entries: the layer's caches.
            position_bias: ``[rate, width]`` float32; ``score = gate + position_bias[position % rate]``.
            norm: ``[head_dim]``, weight of the norm.

        T may be 0. Capturable.
        """
        ...
