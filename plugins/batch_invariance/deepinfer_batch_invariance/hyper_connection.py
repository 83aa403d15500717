"""Hyper-connections on the host: one tiled product for the coefficients of all rows, then numpy.

A row's coefficients are M (M + 2) numbers. They lie with the rows last, ``[M, M, T]``, so that every sum over streams
is a chain of additions in order of the stream.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, HyperConnectionRequest, HyperHeadRequest

from .linear import TiledWeight, packed
from .self_check import random_row, require_steady, threads

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

# A large coefficient overflows exp, which is right: its sigmoid is 0. Rows that hold NaN are reported elsewhere.
_quiet = np.errstate(over="ignore", invalid="ignore")


@attrs.frozen(eq=False)
class Mixing:
    """``fn`` packed; ``scale`` and ``base`` ``[coefficients, 1]``, one for each."""

    fn: TiledWeight
    scale: Array
    base: Array


class HyperConnection:
    """Mixes M float32 streams into a sub-layer's input and its output back."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        self._request = request
        self._threads = context.num_threads
        m, hidden = request.streams, request.hidden
        row = random_row(m, hidden)
        with threads(context.num_threads):
            require_steady(lambda x: _norms(x, 1e-6).transpose(0, 1), row, f"norm of {m * hidden} channels")

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Mixing:
        """Spread the three scales over the rows they belong to."""
        m = self._request.streams
        spread = scale.to("cpu", torch.float32).repeat_interleave(torch.tensor([m, m, m * m]))
        return _mixing(fn, base, spread, self._threads)

    @_quiet
    def mix(self, streams: torch.Tensor, weight: Mixing) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``[T, M, hidden]`` float32 -> ``[T, hidden]``, and ``post [T, M, 1]`` with ``C`` transposed ``[T, M, M]``."""
        r, m, rows = self._request, self._request.streams, streams.shape[0]
        z = _coefficients(streams, weight, r.norm_eps)
        pre, post = _sigmoid(z[:m]) + np.float32(r.eps), np.float32(2) * _sigmoid(z[m : 2 * m])
        comb = self._balanced(z[2 * m :].reshape(m, m, rows))
        gates = torch.from_numpy(np.ascontiguousarray(pre.T))
        mixed = _weighted(gates[:, None], streams)[:, 0]
        turned = torch.from_numpy(np.ascontiguousarray(comb.transpose(2, 1, 0)))
        return mixed, (torch.from_numpy(np.ascontiguousarray(post.T))[:, :, None], turned)

    def merge(
        self, streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """``h'_k = post_k * output + sum_j C_jk h_j``."""
        post, comb = mixed
        return _weighted(comb, streams).add_(post * output[:, None])

    def _balanced(self, logits: Array) -> Array:
        """``[M, M, T]`` -> the same: softmax by rows plus eps, then rows and columns divided in turn."""
        eps = np.float32(self._request.eps)
        comb: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
        comb /= _sum(comb, 1)
        comb += eps
        comb /= _sum(comb, 0) + eps
        for _ in range(self._request.iterations - 1):
            comb /= _sum(comb, 1) + eps
            comb /= _sum(comb, 0) + eps
        return comb


class HyperHead:
    """The streams' last sum."""

    def __init__(self, request: HyperHeadRequest, context: BuildContext) -> None:
        self._request = request
        self._threads = context.num_threads

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Mixing:
        """One scale for all rows."""
        return _mixing(fn, base, scale.to("cpu", torch.float32).expand(base.shape[0]), self._threads)

    @_quiet
    def run(self, streams: torch.Tensor, weight: Mixing) -> torch.Tensor:
        """``[T, M, hidden]`` float32 -> ``[T, hidden]``."""
        r = self._request
        gates = _sigmoid(_coefficients(streams, weight, r.norm_eps)) + np.float32(r.eps)
        return _weighted(torch.from_numpy(np.ascontiguousarray(gates.T))[:, None], streams)[:, 0]


def _mixing(fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, num_threads: int) -> Mixing:
    weight = packed(fn.to("cpu", torch.float32), None, num_threads)
    return Mixing(weight, scale.numpy()[:, None], base.to("cpu", torch.float32).numpy()[:, None])


def _coefficients(streams: torch.Tensor, weight: Mixing, norm_eps: float) -> Array:
    """``z * scale + base`` of every row, ``[coefficients, T]``, fresh memory."""
    z: Array = np.ascontiguousarray(weight.fn.times(streams.flatten(1)).numpy().T)
    z /= _norms(streams, norm_eps).numpy()
    z *= weight.scale
    z += weight.base
    return z


def _norms(streams: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """``[1, T]``: the root of the mean square of each row."""
    flat = streams.flatten(1)
    length: torch.Tensor = torch.linalg.vector_norm(flat, dim=-1)[None]
    return length.square_().div_(flat.shape[1]).add_(norm_eps).sqrt_()


def _weighted(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """``[T, n, M]`` and ``[T, M, hidden]`` -> ``[T, n, hidden]``, streams added in order, fresh memory."""
    total = weights[:, :, 0, None] * streams[:, None, 0]
    for stream in range(1, streams.shape[1]):
        total.add_(weights[:, :, stream, None] * streams[:, None, stream])
    return total


def _sigmoid(x: Array) -> Array:
    """By numpy's exponential, the same wherever an element lies."""
    gates: Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return gates


def _sum(comb: Array, axis: int) -> Array:
    """Over the first or second of three axes, kept, in order."""
    parts = [comb[j : j + 1] if axis == 0 else comb[:, j : j + 1] for j in range(comb.shape[axis])]
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
