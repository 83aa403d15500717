"""Pointwise operators: norms, rotary embedding, gated activation, embedding lookup."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class RmsNormRequest(OpRequest):
    """``w * x / sqrt(mean(x^2) + eps)`` over the last dimension; statistics and product in float32."""

    op: ClassVar[str] = "pointwise.rms_norm"

    hidden: int
    eps: float
    dtype: str


class RmsNorm(Protocol):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` -> same shape and dtype, fresh memory. Zero rows are legal. Capturable."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``s = x + residual``; returns ``(norm(s), s)``.

        ``residual`` may be overwritten with ``s``; ``x`` is left alone. Callers use only what is returned.
        """
        ...


@attrs.frozen(kw_only=True)
class RopeRequest(OpRequest):
    """Rotary position embedding on ``rotary_dim`` channels of each head.

    Attributes:
        head_dim, rotary_dim: channels; ``rotary_dim`` is even.
        theta: base.
        interleaved: True pairs channels (2i, 2i+1); False pairs (i, i + rotary_dim/2).
        trailing: True rotates the last ``rotary_dim`` channels, False the first.
        scaling: Hugging Face ``rope_scaling`` fields (``rope_type`` of ``linear``, ``llama3`` or ``yarn``), or empty.
        max_positions: largest position + 1.
    """

    op: ClassVar[str] = "pointwise.rope"

    head_dim: int
    rotary_dim: int
    theta: float
    dtype: str
    max_positions: int
    interleaved: bool = False
    trailing: bool = False
    scaling: Mapping[str, Any] = attrs.field(factory=dict)


class Rope(Protocol):
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864). Angles, cos, sin and products in float32."""

    def plan(self, positions: torch.Tensor) -> Any:
        """``[T]`` int64 -> tables shared by all layers of the step."""
        ...

    def run(self, x: torch.Tensor, plan: Any, inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape and dtype, fresh memory. Capturable.

        ``inverse`` rotates by the negative angle, with the same factor on cos and sin.
        """
        ...


@attrs.frozen(kw_only=True)
class SwigluRequest(OpRequest):
    """``silu(gate) * up``.

    Attributes:
        width: channels of each half.
        limit: None, or the clamp before the activation: ``gate <= limit`` and ``-limit <= up <= limit``.
    """

    op: ClassVar[str] = "pointwise.swiglu"

    width: int
    dtype: str
    limit: float | None = None


class Swiglu(Protocol):
    """Gated activation (Shazeer 2020, arXiv:2002.05202)."""

    def run(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[M, 2*width]`` (gate first) -> ``[M, width]``, same dtype, fresh memory. Capturable."""
        ...


@attrs.frozen(kw_only=True)
class EmbeddingRequest(OpRequest):
    """Row lookup in a table of ``vocab_size`` rows."""

    op: ClassVar[str] = "pointwise.embedding"

    vocab_size: int
    hidden: int
    dtype: str
    weight_dtype: str


class Embedding(Protocol):
    """Token embedding."""

    def prepare(self, weight: torch.Tensor) -> Any:
        """Pack ``[vocab_size, hidden]`` at load time, as for ``gemm.linear``."""
        ...

    def run(self, token_ids: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[T]`` int64 in ``[0, vocab_size)`` -> ``[T, hidden]`` in the request's dtype. Capturable."""
        ...
