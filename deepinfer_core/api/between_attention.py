"""The region from what a layer's attention gives to what the next layer's attention asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

from .fused import GatedLinearRequest
from .gemm import LinearRequest, WeightPart
from .pointwise import RmsNormRequest
from .provider import OpRequest

if TYPE_CHECKING:
    import torch

BetweenPart = Literal["attention_out", "gate_up", "down", "qkv"]
"""Weights of a layer that ``fused.between_attention`` multiplies by."""


@attrs.frozen(kw_only=True)
class BetweenAttentionRequest(OpRequest):
    """All of a pre-norm decoder but its attention: ``gemm.linear`` of the attended rows, ``pointwise.rms_norm`` of
    their sum with the residual, ``fused.gated_linear``, ``gemm.linear``, the norm again, and the next layer's merged
    ``gemm.linear`` to queries, keys and values.

    Attributes:
        hidden: of the residual rows. attended: of the attended rows. width: of the gated layer, as in
            GatedLinearRequest. merged: of the queries, keys and values together.
        eps: of both norms. dtype: of all rows, and of the norms' weights. weight_dtype: of the four weights.
        attention_bias: the first and the last product have a bias. mlp_bias: those between have one.
        limit: as in SwigluRequest.
    """

    op: ClassVar[str] = "fused.between_attention"

    hidden: int
    attended: int
    width: int
    merged: int
    eps: float
    dtype: str
    weight_dtype: str
    attention_bias: bool = False
    mlp_bias: bool = False
    limit: float | None = None

    @property
    def norm(self) -> RmsNormRequest:
        """The part before either product of the residual rows, without demands as all parts here."""
        return RmsNormRequest(hidden=self.hidden, eps=self.eps, dtype=self.dtype, device_type=self.device_type)

    @property
    def attention_out(self) -> LinearRequest:
        """The first product."""
        return self._linear(self.attended, self.hidden, self.attention_bias)

    @property
    def gated(self) -> GatedLinearRequest:
        """The second, with its activation; its weight is the part ``gate_up``."""
        return GatedLinearRequest(
            in_features=self.hidden,
            width=self.width,
            dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            bias=self.mlp_bias,
            limit=self.limit,
            device_type=self.device_type,
        )

    @property
    def down(self) -> LinearRequest:
        """The third."""
        return self._linear(self.width, self.hidden, self.mlp_bias)

    @property
    def qkv(self) -> LinearRequest:
        """The last, of the next layer."""
        return self._linear(self.hidden, self.merged, self.attention_bias)

    def _linear(self, inner: int, out: int, bias: bool) -> LinearRequest:
        return LinearRequest(
            in_features=inner,
            out_features=out,
            dtype=self.dtype,
            out_dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            bias=bias,
            device_type=self.device_type,
        )


@attrs.frozen(kw_only=True, eq=False)
class BetweenWeights:
    """What one call of ``fused.between_attention`` multiplies by; weights as ``prepare`` gave them.

    Attributes:
        attention_out, gate_up, down: of the layer. norm: ``[hidden]``, of the norm before its gated layer.
        next_norm: ``[hidden]``, of the norm before the next layer, or behind the last.
        next_qkv: of the next layer; None behind the last.
    """

    attention_out: Any
    norm: torch.Tensor
    gate_up: Any
    down: Any
    next_norm: torch.Tensor
    next_qkv: Any


class BetweenAttention(Protocol):
    """Products, norms and sums between one layer's attention and the next one's."""

    def prepare(self, part: BetweenPart, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        """Pack a layer's weight, as ``gemm.linear`` does: of parts that stack to ``[out_features, in_features]``, gate
        first in ``gate_up``."""
        ...

    def first(self, residual: torch.Tensor, norm: torch.Tensor, qkv: Any) -> torch.Tensor:
        """Before the first layer: ``norm(residual) @ QKV.T``, ``[T, hidden]`` -> ``[T, merged]``, fresh memory.
        ``residual`` is left alone. T may be 0. Capturable."""
        ...

    def run(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``s = residual + attended @ O.T``, ``t = s + gated(norm(s)) @ D.T``: returns ``norm(t) @ QKV.T`` and ``t``.

        Args:
            attended: ``[T, attended]``; left alone. T may be 0.
            residual: ``[T, hidden]``; may be overwritten, and be the memory of ``t``.
            weights: the layer's.

        Returns:
            ``[T, merged]``, or ``norm(t)``, ``[T, hidden]``, where ``next_qkv`` is None: fresh memory; and ``t``,
            ``[T, hidden]``. Both sums are rounded to ``dtype``; of the other parts' results each is rounded as if its
            part ran alone, or not at all, or before its row is scaled by the norm. Capturable.
        """
        ...
