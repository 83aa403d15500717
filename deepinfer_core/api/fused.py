"""Regions: what one operator may do in place of several, where that pays.

A model lists regions beside its operators (:class:`~deepinfer_core.api.ModelSpec`). A region's operator computes what
its parts would, and is chosen only if a plugin offers one that meets the request's demands; otherwise the parts serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .attention import WriteKVRequest
from .gemm import LinearRequest, WeightPart
from .pointwise import RmsNormRequest, RopeRequest, SwigluRequest
from .provider import OpRequest

if TYPE_CHECKING:
    import torch

    from .attention import StepLayout
    from .kv_layout import LayerCache
    from .sampling import SamplingBatch

PARTS = "parts"
"""What a user's list names, and a plan says, where the parts of a region serve instead of it."""


@attrs.frozen(kw_only=True)
class Region:
    """A region a model can use.

    Attributes:
        request: of a ``fused.*`` operator.
        replaces: slots of ``ModelSpec.ops`` that it takes the place of. A slot is left out of the operator table when
            every region that lists it was chosen. A region listed behind this one, all of whose slots are among these,
            is one of its parts too: it is not used where this one is.
        beside: its parts stay in the table, since the region serves some steps and they the others.
    """

    request: OpRequest
    replaces: tuple[str, ...]
    beside: bool = False


@attrs.frozen(kw_only=True)
class AttentionInputsRequest(OpRequest):
    """From merged query, key and value rows to what paged attention reads: ``pointwise.rms_norm`` of every query and
    key head, ``pointwise.rope`` of the whole head in halves, ``attention.write_kv``.

    Attributes:
        cache_group: group written; the engine adds the demand ``kv_layout:<layout>`` for it.
        q_heads, kv_heads, head_dim: of the merged rows: ``q_heads`` query heads, then ``kv_heads`` keys, then values.
        theta, scaling, max_positions: as in RopeRequest.
        norm_eps: of the heads' norm; None: there is none.
        dtype: of rows, weights and result. cache_dtype, block_size: as in WriteKVRequest.
    """

    op: ClassVar[str] = "fused.attention_inputs"

    cache_group: str
    q_heads: int
    kv_heads: int
    head_dim: int
    theta: float
    max_positions: int
    norm_eps: float | None
    dtype: str
    cache_dtype: str
    block_size: int
    scaling: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def cache_groups(self) -> tuple[str, ...]:
        return (self.cache_group,)

    @property
    def head_norm(self) -> RmsNormRequest | None:
        """The part that norms heads, without demands as all parts here; None where there is none."""
        if self.norm_eps is None:
            return None
        return RmsNormRequest(hidden=self.head_dim, eps=self.norm_eps, dtype=self.dtype, device_type=self.device_type)

    @property
    def rope(self) -> RopeRequest:
        """The part that turns queries and keys."""
        return RopeRequest(
            head_dim=self.head_dim,
            rotary_dim=self.head_dim,
            theta=self.theta,
            scaling=self.scaling,
            max_positions=self.max_positions,
            dtype=self.dtype,
            device_type=self.device_type,
        )

    @property
    def write_kv(self) -> WriteKVRequest:
        """The part that writes the cache."""
        return WriteKVRequest(
            cache_group=self.cache_group,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            block_size=self.block_size,
            device_type=self.device_type,
        )


class AttentionInputs(Protocol):
    """Norm of the heads, rotary embedding and cache write of a layer."""

    def plan(self, layout: StepLayout) -> Any:
        """Once a step, shared by all layers of the group."""
        ...

    def run(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        plan: Any,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the layer's keys and values, and nothing else of the cache, and return the queries.

        Args:
            qkv: ``[T, (q_heads + 2 * kv_heads) * head_dim]``; left alone. T may be 0.
            cache: the layer's.
            plan: what :meth:`plan` returned for this step.
            q_norm, k_norm: ``[head_dim]`` each, iff ``norm_eps`` is set.

        Returns:
            ``[T, q_heads, head_dim]``, same dtype, fresh memory. Each part's result is rounded to ``dtype`` as if it
            ran alone, or not at all before the last. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class GatedLinearRequest(OpRequest):
    """``silu(x @ G.T) * (x @ U.T)``: ``gemm.linear`` of the merged weight ``[G, U]``, then ``pointwise.swiglu``.

    Attributes:
        in_features: of x. width: rows of ``G``, and of ``U``.
        dtype: of x and y. weight_dtype, bias: as in LinearRequest, the bias for both. limit: as in SwigluRequest.
    """

    op: ClassVar[str] = "fused.gated_linear"

    in_features: int
    width: int
    dtype: str
    weight_dtype: str
    bias: bool = False
    limit: float | None = None

    @property
    def linear(self) -> LinearRequest:
        """The merged product, without demands."""
        return LinearRequest(
            in_features=self.in_features,
            out_features=2 * self.width,
            dtype=self.dtype,
            out_dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            bias=self.bias,
            device_type=self.device_type,
        )

    @property
    def swiglu(self) -> SwigluRequest:
        """The gate."""
        return SwigluRequest(width=self.width, limit=self.limit, dtype=self.dtype, device_type=self.device_type)


class GatedLinear(Protocol):
    """The first half of a gated feed-forward layer."""

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        """Pack parts that stack to ``[2 * width, in_features]``, gate first, as for ``gemm.linear``."""
        ...

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, width]``, fresh memory. M may be 0. Capturable.

        The product may be rounded to ``dtype`` before the activation, or not.
        """
        ...


SAMPLED_TOGETHER = ("temperature", "top_k", "top_p", "draw")
"""Stages that ``fused.sample_tokens`` takes the place of."""


@attrs.frozen(kw_only=True)
class SampleTokensRequest(OpRequest):
    """From logits to tokens in steps whose rows need no other stage than :data:`SAMPLED_TOGETHER`.

    Attributes:
        vocab_size: width of the logits.
    """

    op: ClassVar[str] = "fused.sample_tokens"

    vocab_size: int


class SampleTokens(Protocol):
    """Those stages of :data:`SAMPLED_TOGETHER` that are active, and the draw.

    The engine asks it in steps without another stage, without drafts judged by rejection, and without rows that report
    log-probabilities of processed logits; in all others the parts serve. Caps as for stages.
    """

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32, left alone -> ``[N]`` int64 tokens, as the stages of ``batch.active`` would give them.

        Ids at or above ``batch.token_limit`` are never drawn, whether the mask is active or not. -1 for a row that
        holds a NaN, a +inf, or nothing but -inf below it. The sum by which top-p decides may be rounded otherwise
        than the stage's. Rows are independent of each other. N may be 0.
        """
        ...
