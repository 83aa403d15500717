"""Hyper-connections for the host: the coefficients of all rows in numpy, whose small calls cost a fraction of torch's.

With four streams a row has 24 coefficients, and 39 divisions follow each other on 16 of them. A division is two calls
here: one product with a constant matrix gives every element the sum of its row, or of its column, with eps already
added; then the quotient. The eps comes from a 17th element that is always 1. A step of few rows takes an eighth of the
time of the reference, which makes some 150 calls of torch.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, HyperConnectionRequest, HyperHeadRequest

Array = np.ndarray[Any, np.dtype[np.float32]]

# A large coefficient overflows exp, which is right: its sigmoid is 0. Rows that hold NaN are reported elsewhere.
_quiet = np.errstate(over="ignore", invalid="ignore")


@attrs.frozen(eq=False)
class Mixing:
    """``fn`` as a float32 tensor, ``scale`` and ``base`` spread over its rows. Those of sigmoids have their sign
    changed, so that ``exp`` can follow at once."""

    fn: torch.Tensor
    scale: Array
    base: Array


class HyperConnection:
    """Mixes M float32 streams into a sub-layer's input and its output back."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        m = self._streams = request.streams
        self._rounds = request.iterations - 1
        self._norm_eps = request.norm_eps
        self._channels = request.streams * request.hidden
        self._eps = np.float32(request.eps)
        self._tops = np.repeat(np.array([1, 2], np.float32), m)
        self._by_rows = _sums(m, request.eps, rows=True)
        self._by_columns = _sums(m, request.eps, rows=False)

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Mixing:
        """Spread the three scales over the rows they belong to."""
        m = self._streams
        counts = torch.tensor([m, m, m * m])
        signs = torch.cat((torch.full((2 * m,), -1.0), torch.ones(m * m)))
        spread = scale.to("cpu", torch.float32).repeat_interleave(counts) * signs
        return Mixing(fn.to("cpu", torch.float32), spread.numpy(), (base.to("cpu", torch.float32) * signs).numpy())

    @_quiet
    def mix(self, streams: torch.Tensor, weight: Mixing) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``[T, M, hidden]`` float32 -> ``[T, hidden]``, and ``post [T, M, 1]`` with ``C`` transposed ``[T, M, M]``."""
        m, rows = self._streams, streams.shape[0]
        z = _coefficients(streams, weight, self._norm_eps)
        gates = z[:, : 2 * m]
        np.exp(gates, out=gates)
        gates += 1
        np.divide(self._tops, gates, out=gates)
        gates[:, :m] += self._eps
        comb = torch.from_numpy(self._balanced(z[:, 2 * m :])[:, :-1]).view(rows, m, m)
        both = torch.from_numpy(gates)
        mixed = torch.bmm(both[:, None, :m], streams)[:, 0]
        return mixed, (both[:, m:, None], comb.transpose(1, 2))

    def merge(
        self, streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """``h'_k = post_k * output + sum_j C_jk h_j``."""
        post, comb = mixed
        return torch.baddbmm(post * output[:, None], comb, streams)

    def _balanced(self, logits: Array) -> Array:
        """``[T, M*M]`` -> ``[T, M*M + 1]``: softmax by rows plus eps, then rows and columns divided in turn."""
        m, rows = self._streams, logits.shape[0]
        comb = np.ones((rows, m * m + 1), np.float32)
        square = logits.reshape(rows, m, m)
        powers = np.exp(square - square.max(-1, keepdims=True))
        powers /= powers.sum(-1, keepdims=True)
        powers += self._eps
        comb[:, :-1] = powers.reshape(rows, m * m)
        sums = np.empty_like(comb)
        times, divide, by_rows, by_columns = comb.dot, np.divide, self._by_rows, self._by_columns
        times(by_columns, sums)
        divide(comb, sums, comb)
        before = b""
        for _ in range(self._rounds):
            times(by_rows, sums)
            divide(comb, sums, comb)
            times(by_columns, sums)
            divide(comb, sums, comb)
            # A round that changes no bit is the last that could have: all that follow repeat it.
            after = comb.tobytes()
            if after == before:
                break
            before = after
        return comb


class HyperHead:
    """The streams' last sum."""

    def __init__(self, request: HyperHeadRequest, context: BuildContext) -> None:
        self._norm_eps = request.norm_eps
        self._eps = np.float32(request.eps)

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> Mixing:
        """One scale for all rows."""
        spread = -scale.to("cpu", torch.float32).expand(base.shape[0])
        return Mixing(fn.to("cpu", torch.float32), spread.numpy(), -base.to("cpu", torch.float32).numpy())

    @_quiet
    def run(self, streams: torch.Tensor, weight: Mixing) -> torch.Tensor:
        """``[T, M, hidden]`` float32 -> ``[T, hidden]``."""
        gates = _coefficients(streams, weight, self._norm_eps)
        np.exp(gates, out=gates)
        gates += 1
        np.divide(np.float32(1), gates, out=gates)
        gates += self._eps
        return torch.bmm(torch.from_numpy(gates)[:, None], streams)[:, 0]


def _coefficients(streams: torch.Tensor, weight: Mixing, norm_eps: float) -> Array:
    """``z * scale + base`` of every row, fresh memory."""
    flat = streams.flatten(1)
    product = torch.nn.functional.linear(flat, weight.fn)
    length = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    z: Array = product.numpy()
    spread: Array = length.numpy()
    np.square(spread, out=spread)
    spread /= flat.shape[1]
    spread += np.float32(norm_eps)
    np.sqrt(spread, out=spread)
    z /= spread
    z *= weight.scale
    z += weight.base
    return z


def _sums(m: int, eps: float, *, rows: bool) -> Array:
    """``[M*M + 1, M*M + 1]``: a product with it gives each element of a row-major matrix the sum of its row (or
    column) plus eps times the last element, and the last element itself."""
    size = m * m
    place = np.arange(size) // m if rows else np.arange(size) % m
    matrix = np.zeros((size + 1, size + 1), np.float32)
    matrix[:size, :size] = place[:, None] == place
    matrix[size, :size] = eps
    matrix[size, size] = 1
    return matrix
