"""Mistakes in the region between one layer's attention and the next one's."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from broken import Wrapped, mutant

BETWEEN = "fused.between_attention"


@mutant(BETWEEN, f"{BETWEEN}/float32/odd_rows", "output 'y'")
def one_norm_for_both(request: Any, right: Any) -> Any:
    def run(attended: torch.Tensor, residual: torch.Tensor, weights: Any) -> Any:
        return right.run(attended, residual, attrs.evolve(weights, next_norm=weights.norm))

    return Wrapped(right, run=run)


@mutant(BETWEEN, f"{BETWEEN}/float32/odd_rows", "output 'sum'")
def residual_left_out(request: Any, right: Any) -> Any:
    def run(attended: torch.Tensor, residual: torch.Tensor, weights: Any) -> Any:
        before = residual.clone()
        rows, total = right.run(attended, residual, weights)
        return rows, total - before

    return Wrapped(right, run=run)


@mutant(BETWEEN, f"{BETWEEN}/float32/odd_rows", "tolerance")
def sums_scaled_by_the_next_rows_square(request: Any, right: Any) -> Any:
    """The sum is right, and what multiplies it has the size of its neighbour."""

    def run(attended: torch.Tensor, residual: torch.Tensor, weights: Any) -> Any:
        rows, total = right.run(attended, residual, weights)
        size = total.square().mean(1, keepdim=True).add(request.eps).sqrt()
        return rows * size / size.roll(-1, 0), total

    return Wrapped(right, run=run)


@mutant(BETWEEN, f"{BETWEEN}/float32/odd_rows", "row 2")
def eps_left_out_of_between(request: Any, right: Any) -> Any:
    free = right.again(eps=0.0)
    return Wrapped(right, run=free.run)


@mutant(BETWEEN, f"{BETWEEN}[last]/float32/odd_rows", "output 'y'")
def sums_returned_for_the_norm(request: Any, right: Any) -> Any:
    def run(attended: torch.Tensor, residual: torch.Tensor, weights: Any) -> Any:
        rows, total = right.run(attended, residual, weights)
        return (total.clone() if weights.next_qkv is None else rows), total

    return Wrapped(right, run=run)


@mutant(BETWEEN, f"{BETWEEN}[first]/float32/odd_rows", "changed its input 'residual'")
def first_norm_in_place(request: Any, right: Any) -> Any:
    def first(residual: torch.Tensor, norm: torch.Tensor, qkv: Any) -> torch.Tensor:
        rows: torch.Tensor = right.first(residual, norm, qkv)
        residual.mul_(torch.rsqrt(residual.square().mean(1, keepdim=True) + request.eps))
        return rows

    return Wrapped(right, first=first)


@mutant(BETWEEN, f"{BETWEEN}[bias]/float32/odd_rows", "tolerance")
def bias_scaled_by_the_norm(request: Any, right: Any) -> Any:
    """As if the last product's bias were added before its rows are scaled."""

    def prepare(part: Any, weights: Any, bias: Any = None) -> Any:
        return right.prepare(part, weights, 2 * bias if part == "qkv" else bias)

    return Wrapped(right, prepare=prepare)


@mutant(BETWEEN, f"{BETWEEN}[limit]/float32/odd_rows", "tolerance")
def clamp_forgotten(request: Any, right: Any) -> Any:
    free = right.again(limit=None)
    return Wrapped(right, run=free.run)
