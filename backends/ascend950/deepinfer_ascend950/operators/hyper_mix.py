"""``pointwise.hyper_connection`` with both halves on the NPU: mix by own Triton kernels, merge by ``npu_mhc_post``.

The kernels are compared with the reference in Triton's interpreter and compiled to Ascend 950 IR; they were not run on
hardware, so they are chosen only when ``ops`` names them.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_ascend950.kernels.hyper_mix import coefficients, gates, weighted_sum
from deepinfer_core.api import BuildContext, HyperConnectionRequest

from .hyper_connection import merge

MOST_LANES = 512
"""Channels of a tile: 32 rows of ``fn`` in float32, twice, take 128 of the 248 KiB of the unified buffer."""


@attrs.frozen(eq=False)
class _Weight:
    """``fn [rows, M * hidden]`` padded with zero rows to a power of two, ``base`` and ``scale``, float32."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def lanes(width: int, most: int = MOST_LANES) -> int:
    """The largest power of two up to ``most`` that divides ``width``."""
    return min(width & -width, most)


class HyperMix:
    """One sub-layer's connection to the streams."""

    def __init__(self, request: HyperConnectionRequest, context: BuildContext) -> None:
        self._request = request
        self._device = context.device

    def prepare(self, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> _Weight:
        """Kept in float32, ``fn`` padded."""
        rows = 1 << (len(fn) - 1).bit_length()
        padded = torch.zeros((rows, fn.shape[1]), dtype=torch.float32, device=self._device)
        padded[: len(fn)] = fn
        return _Weight(padded, *(t.to(device=self._device, dtype=torch.float32) for t in (base, scale)))

    def mix(self, streams: torch.Tensor, weight: _Weight) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """``[T, M, hidden]`` -> ``[T, hidden]``, and ``post [T, M]`` with ``C [T, M, M]``."""
        r = self._request
        tokens, m, hidden = streams.shape
        rows = len(weight.fn)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=streams.device)

        z, pre, post, comb = empty(tokens, rows), empty(tokens, m), empty(tokens, m), empty(tokens, m, m)
        mixed = torch.empty((tokens, hidden), dtype=streams.dtype, device=streams.device)
        if tokens:
            streams = streams.contiguous()
            width = m * hidden
            coefficients[(tokens,)](streams, weight.fn, z, r.norm_eps, ROWS=rows, WIDTH=width, BLOCK=lanes(width))
            gates[(tokens,)](
                z, weight.base, weight.scale, pre, post, comb, r.eps, ROWS=rows, M=m, ITERATIONS=r.iterations
            )
            block = lanes(hidden)
            weighted_sum[(tokens, hidden // block)](streams, pre, mixed, M=m, HIDDEN=hidden, BLOCK=block)
        return mixed, (post, comb)

    def merge(
        self, streams: torch.Tensor, output: torch.Tensor, mixed: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """``h'_k = post_k * output + sum_j C_jk h_j``, ``[T, M, hidden]``."""
        return merge(streams, output, mixed)
