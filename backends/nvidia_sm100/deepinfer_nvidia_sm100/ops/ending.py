"""What follows a product of few rows, as every kernel for it is told: bias, gate, residual, norm, and how to launch."""

from __future__ import annotations

from typing import Any

import attrs
import torch


@attrs.frozen(kw_only=True, eq=False)
class Ending:
    """The part of a launch that does not depend on the tile.

    Attributes:
        bias: ``[N]`` or None. gated, limit, rounded: as :func:`~.few_rows.launch`.
        normed, flags: of :func:`~.normed_rows.arguments`.
        options: of the launch. compile_only: nothing runs.
    """

    bias: torch.Tensor | None
    gated: bool
    limit: float | None
    rounded: bool
    normed: tuple[Any, ...]
    flags: dict[str, Any]
    options: dict[str, Any]
    compile_only: bool

    @property
    def clamp(self) -> float:
        """The gate's limit; any number where there is none."""
        return 0.0 if self.limit is None else self.limit

    def constants(self) -> dict[str, Any]:
        """Of a kernel that has every ending."""
        gate = {"GATED": self.gated, "LIMITED": self.limit is not None, "ROUNDED": self.rounded}
        return {**self.flags, "BIAS": self.bias is not None, **gate, **self.options}
