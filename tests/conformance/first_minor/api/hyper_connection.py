"""Hyper-connections: several residual streams, mixed around every sub-layer (manifold-constrained form)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class HyperConnectionRequest(OpRequest):
    """Mixing of ``streams`` residual streams around one sub-layer. All arithmetic in float32.

    With ``x`` the flattened streams and ``z = (x @ fn.T) / sqrt(mean(x^2) + norm_eps)``:
    ``pre_j = sigmoid(z_j * scale_0 + base_j) + eps``; ``post_j = 2 * sigmoid(z_{M+j} * scale_1 + base_{M+j})``;
    ``A = z_{2M:} * scale_2 + base_{2M:}`` as ``[M, M]``, row-major. ``C = softmax(A, rows) + eps``, columns divided by
    their sum + eps, then ``iterations - 1`` times rows and columns likewise (Sinkhorn and Knopp 1967).

    Attributes:
        streams: M. hidden: channels of one stream.
        iterations: of the normalisation, the first counting its column half only.
        eps, norm_eps: as above.
        dtype: of streams and sub-layer.
    """

    op: ClassVar[str] = "pointwise.hyper_connection"

    streams: int
    hidden: int
    iterations: int
    eps: float
    norm_eps: float
    dtype: str


class HyperConnection(Protocol):
    """One sub-layer's connection to the streams."""

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Any:
        """Pack ``fn [(2+M)*M, M*hidden]``, ``base [(2+M)*M]`` and ``scale [3]``, float32, at load time."""
        ...

    def mix(self, streams: torch.Tensor, weight: Any) -> tuple[torch.Tensor, Any]:
        """``[T, M, hidden]`` -> the sub-layer's input ``sum_j pre_j h_j`` ``[T, hidden]``, and what merge needs.

        T may be 0. Capturable.
        """
        ...

    def merge(self, streams: torch.Tensor, output: torch.Tensor, mixed: Any) -> torch.Tensor:
        """The next streams ``h'_k = post_k * output + sum_j C_jk h_j``, ``[T, M, hidden]``.

        The sum runs over the first index of C. ``output`` is ``[T, hidden]``. ``streams`` may be overwritten with the
        result; callers use only what is returned.
        """
        ...


@attrs.frozen(kw_only=True)
class HyperHeadRequest(OpRequest):
    """The streams' last sum: ``sum_j (sigmoid(z_j * scale + base_j) + eps) h_j``, ``z`` as above. In float32."""

    op: ClassVar[str] = "pointwise.hyper_head"

    streams: int
    hidden: int
    eps: float
    norm_eps: float
    dtype: str


class HyperHead(Protocol):
    """From streams to one hidden state."""

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Any:
        """Pack ``fn [M, M*hidden]``, ``base [M]`` and ``scale [1]``, float32, at load time."""
        ...

    def run(self, streams: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[T, M, hidden]`` -> ``[T, hidden]``, fresh memory. T may be 0. Capturable."""
        ...
