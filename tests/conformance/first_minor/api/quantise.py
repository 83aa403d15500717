"""Simulated quantisation of activations: round to a packed format's grid and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch

QdqFormat = Literal["fp8:e4m3", "fp4:e2m1"]


@attrs.frozen(kw_only=True)
class QuantiseDequantiseRequest(OpRequest):
    """Rounding as a cache in this format would do it, with one power-of-two scale per group of channels.

    ``s = 2^ceil(log2(a / max))`` with a the group's largest magnitude, at least ``1e-4`` for ``fp8:e4m3`` (max 448)
    and ``6 * 2^-126`` for ``fp4:e2m1`` (max 6); ``y = round(clamp(x / s, -max, max)) * s``, ties to even codes.

    Attributes:
        format: grid that values are rounded to.
        width: channels of x. channels: of these, the first ones that are rounded; the rest stay.
        group: channels that share a scale; divides ``channels``.
        hadamard: multiply all channels by the orthonormal Walsh-Hadamard matrix (Sylvester order) first; ``width`` is
            then a power of two.
    """

    op: ClassVar[str] = "pointwise.quantise_dequantise"

    format: QdqFormat
    width: int
    channels: int
    group: int
    dtype: str
    hadamard: bool = False


class QuantiseDequantise(Protocol):
    """Quantise, then dequantise."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` -> same shape and dtype, fresh memory. Zero rows are legal. Capturable."""
        ...
