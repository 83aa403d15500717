"""GEMM: matrix products against weights, with preparation apart from the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True)
class LinearRequest(OpRequest):
    """``y = x @ W.T (+ bias)``.

    Attributes:
        in_features, out_features: of the merged weight.
        dtype: of x. out_dtype: of y. weight_dtype: as stored in the checkpoint
            (a torch dtype's name, or a packed format's: ``"gguf:q8_0"``).
        bias: True if there is one.
    """

    op: ClassVar[str] = "gemm.linear"

    in_features: int
    out_features: int
    dtype: str
    out_dtype: str
    weight_dtype: str
    bias: bool = False


class Linear(Protocol):
    """One linear layer's arithmetic."""

    def prepare(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Any:
        """Pack at load time.

        Args:
            weights: ``[out_i, in_features]`` parts on any device (memory-mapped ones included), stacked along
                the output. The operator owns what it returns and keeps no reference to the parts unless it
                uses one as it is.
            bias: ``[out_features]`` or None.

        Returns:
            an opaque packed weight on the operator's device, for :meth:`run`.
        """
        ...

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, out_features]``, fresh memory, accumulated in float32 or better.

        M may be 0. Capturable.
        """
        ...
