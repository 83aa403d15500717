"""GEMM: matrix products against weights, with preparation apart from the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch


WeightFormat = Literal["fp8:e4m3", "fp4:e2m1"]


@attrs.frozen(kw_only=True, eq=False)
class QuantisedWeight:
    """A weight in packed floating point with power-of-two scales, as stored: ``W = value * 2^(scale - 127)``.

    A provider that keeps such weights as they are stored says so with the cap ``packed_weights``, by which memory is
    estimated.

    Attributes:
        format: of the values. ``fp8:e4m3``: data is float8_e4m3fn ``[out, in]``. ``fp4:e2m1``: data is int8
            ``[out, in/2]``, element 2k of a row in the low half of byte k, 2k+1 in the high half; a half is sign, two
            exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        data, scale: memory-mapped, perhaps. scale is float8_e8m0fnu ``[ceil(out/rows), ceil(in/columns)]``; the byte
            255 means NaN.
        block: (rows, columns) that share a scale.
    """

    format: WeightFormat
    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), in elements."""
        rows, columns = self.data.shape
        return rows, columns * (2 if self.format == "fp4:e2m1" else 1)

    @property
    def weight_dtype(self) -> str:
        """How requests name it, e.g. ``"fp8:e4m3:128x128"``."""
        return quantised_name(self.format, self.block)


def quantised_name(format: WeightFormat, block: tuple[int, int]) -> str:
    """``weight_dtype`` of a request whose weights are :class:`QuantisedWeight`."""
    return f"{format}:{block[0]}x{block[1]}"


WeightPart: TypeAlias = "torch.Tensor | QuantisedWeight"


@attrs.frozen(kw_only=True)
class LinearRequest(OpRequest):
    """``y = x @ W.T (+ bias)``.

    Attributes:
        in_features, out_features: of the merged weight.
        dtype: of x. out_dtype: of y. weight_dtype: as stored in the checkpoint
            (a torch dtype's name, or a packed format's: ``"gguf:q8_0"``, ``QuantisedWeight.weight_dtype``).
        bias: True if there is one.
        activations: ``""``, or the format and group that x is rounded to first, as ``pointwise.quantise_dequantise``
            does over all its channels (a last group may be short), e.g. ``"fp8:e4m3:128"``. Adds the demand
            ``rounded_activations``. Sums within a group may then be as coarse as those of matrix units that multiply
            FP8: 2^-10 of the sum of magnitudes.
    """

    op: ClassVar[str] = "gemm.linear"

    in_features: int
    out_features: int
    dtype: str
    out_dtype: str
    weight_dtype: str
    bias: bool = False
    activations: str = ""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.activations:
            format, _, group = self.activations.rpartition(":")
            if format not in ("fp8:e4m3", "fp4:e2m1") or not group.isdigit() or int(group) < 1:
                raise ValueError(f"activations={self.activations!r}: expected a format and a group, as fp8:e4m3:128")
            object.__setattr__(self, "demands", self.demands | {"rounded_activations"})


class Linear(Protocol):
    """One linear layer's arithmetic."""

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> Any:
        """Pack at load time.

        Args:
            weights: ``[out_i, in_features]`` parts on any device (memory-mapped ones included), stacked along
                the output. Parts are :class:`QuantisedWeight` iff ``weight_dtype`` names such a format: keep them
                packed if ``run`` computes on them, else dequantise. The operator owns what it returns and keeps
                no reference to the parts unless it uses one as it is.
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


@attrs.frozen(kw_only=True)
class BatchedLinearRequest(OpRequest):
    """``y[:, g] = x[:, g] @ W[g].T``: every row goes through all ``groups`` weights, each on its own slice.

    ``in_features`` and ``out_features`` are of one group; dtypes as in LinearRequest.
    """

    op: ClassVar[str] = "gemm.batched"

    groups: int
    in_features: int
    out_features: int
    dtype: str
    out_dtype: str
    weight_dtype: str


class BatchedLinear(Protocol):
    """A block-diagonal linear layer."""

    def prepare(self, weights: Sequence[WeightPart]) -> Any:
        """Pack parts that stack to ``[groups * out_features, in_features]``, as for ``gemm.linear``."""
        ...

    def run(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[M, groups, in_features]`` -> ``[M, groups, out_features]``, fresh memory. M may be 0. Capturable."""
        ...


@attrs.frozen(kw_only=True)
class GroupedLinearRequest(OpRequest):
    """``y[i] = x[i] @ W[group of i].T``: rows sorted by group, one weight a group (experts).

    Fields as in BatchedLinearRequest.
    """

    op: ClassVar[str] = "gemm.grouped"

    groups: int
    in_features: int
    out_features: int
    dtype: str
    out_dtype: str
    weight_dtype: str


class GroupedLinear(Protocol):
    """Many linear layers, each over its own rows."""

    def prepare(self, weights: Sequence[Sequence[WeightPart]]) -> Any:
        """Pack ``groups`` lists of parts, each stacking to ``[out_features, in_features]``."""
        ...

    def run(self, x: torch.Tensor, offsets: torch.Tensor, weight: Any) -> torch.Tensor:
        """``[N, in_features]`` -> ``[N, out_features]``, fresh memory.

        ``offsets [groups + 1]`` int64: group g owns rows ``offsets[g]:offsets[g+1]``, none perhaps. N may be 0.
        """
        ...
