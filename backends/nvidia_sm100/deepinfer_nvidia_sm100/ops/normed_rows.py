"""A norm between two products without a kernel of its own: at the end of the first and at the end of the second.

``norm(s) @ W.T`` is ``(s * g) @ W.T`` with every row of the result divided by the root of that row's mean square. So
the product that makes the sums ``s`` writes ``s * g`` and, for each of its tiles, the sum of the squares of every row's
elements; the one that reads them adds these up, a few KB, and scales its results. Neither's inner loop is touched: with
a norm at the beginning of the second, tiles of its rows are no longer copied straight to the matrix unit.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import triton
import triton.language as tl

from .shapes import power_of_two

LEAST_PARTS = 64
"""Parts up to which all numbers of them share a compiled kernel."""


@triton.jit
def add_tile(
    out, residual, factor, squares, acc, before, bias, tile, row, row_mask, column, column_mask, M, N,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Add a finished tile of the product to the residual rows, and write what the next product needs of the sums:
    the sums times the norm's weight, and their squares' sum over the tile, for every row. ``before``: the residual."""
    if BIAS:
        acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[:, None]
    place = row[None, :].to(tl.int64) * N + column[:, None]
    mask = column_mask[:, None] & row_mask[None, :]
    total = (acc + before.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + place, total, mask=mask)
    wide = total.to(tl.float32)
    tl.store(out + place, (wide * factor[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(squares + tile * M + row, tl.sum(wide * wide, axis=0), mask=row_mask)


@triton.jit
def row_squares(squares, row, row_mask, M, parts, PARTS: tl.constexpr):
    """``[PARTS, rows]``: what the tiles of the product before say of each row. To be added when it is needed."""
    part = tl.arange(0, PARTS)
    place = part[:, None] * M + row[None, :]
    return tl.load(squares + place, mask=(part < parts)[:, None] & row_mask[None, :], other=0.0)


@triton.jit
def norm_scale(found, K, eps):
    """``1 / sqrt(mean square + eps)`` of every row of K elements."""
    return 1.0 / tl.sqrt(tl.sum(found, axis=0) / K + eps)


@attrs.frozen
class Add:
    """Results are added to ``residual [M, N]``, in place; out then holds the sums times ``norm_weight [N]``, and
    ``squares [tiles of columns, M]`` float32 the sum of the squares of the sums, tile by tile."""

    residual: torch.Tensor
    norm_weight: torch.Tensor
    squares: torch.Tensor


@attrs.frozen
class Scale:
    """Results of a row are multiplied by ``1 / sqrt(mean square + eps)``, where the sum of the squares of the row's K
    elements comes in ``squares [parts, M]``."""

    squares: torch.Tensor
    parts: int
    eps: float


def arguments(add: Add | None, scale: Scale | None, out: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What kernels take for either, in order (``out`` for tensors that are not used), and their flags."""
    squares = add.squares if add is not None else scale.squares if scale is not None else out
    residual, weight = (out, out) if add is None else (add.residual, add.norm_weight)
    parts, eps = (0, 0.0) if scale is None else (scale.parts, scale.eps)
    return (residual, weight, squares, parts, eps), {
        "ADD": add is not None,
        "PARTS": 0 if scale is None else power_of_two(max(scale.parts, LEAST_PARTS)),
    }
