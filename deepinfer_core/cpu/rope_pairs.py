"""Rotary embedding of neighbouring channels on the host: a pair is a complex number, its rotation one product.

In numpy, whose views and products of few rows cost a fraction of torch's.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch

from deepinfer_core.api import BuildContext, RopeRequest

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Turns: TypeAlias = np.ndarray[Any, np.dtype[np.complex64]]


class RopePairs:
    """Rotates channels 2i and 2i+1 of the first, or last, ``rotary_dim``; the others pass through.

    cos and sin of every position come from the reference operator, which defines them.
    """

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        self._turns = turns_of(request, context)
        start = request.head_dim - request.rotary_dim if request.trailing else 0
        self._rotated = slice(start, start + request.rotary_dim)

    def plan(self, positions: torch.Tensor) -> tuple[Turns, Turns]:
        """``[T]`` int64 -> the rotations ``[T, 1, rotary_dim / 2]``, and those the other way."""
        turns = self._turns.take(positions.numpy(), axis=0)
        return turns, turns.conj()

    def run(self, x: torch.Tensor, plan: tuple[Turns, Turns], inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` float32 -> same shape, fresh memory; ``inverse`` turns the other way."""
        return torch.from_numpy(self.turned(x.numpy(), plan[1] if inverse else plan[0]))

    def turned(self, x: Array, turns: Turns) -> Array:
        """``run`` on arrays, with the rotations to use."""
        y = x.copy()
        pairs = y[..., self._rotated].view(np.complex64)
        np.multiply(pairs, turns, pairs)
        return y


_TABLES: WeakValueDictionary[tuple[Any, ...], Turns] = WeakValueDictionary()


def turns_of(request: RopeRequest, context: BuildContext) -> Turns:
    """``cos + i sin`` of every position, ``[max_positions, 1, rotary_dim / 2]``; equal angles share one table."""
    scaling = tuple(sorted((name, str(value)) for name, value in request.scaling.items()))
    key = (request.rotary_dim, request.theta, request.max_positions, scaling)
    table = _TABLES.get(key)
    if table is None:
        cos, sin = context.reference(request).plan(torch.arange(request.max_positions))
        table = _TABLES[key] = torch.complex(cos, sin).numpy()
    return table
