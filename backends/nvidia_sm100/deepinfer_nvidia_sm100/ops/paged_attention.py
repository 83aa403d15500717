"""``attention.paged``: tiles and splits for the kernels of :mod:`.attention_kernel`.

Rows that decode, and drafts, become small tiles whose context is split over programs; prompt chunks become tiles of
many rows. Under the demand ``batch_invariant`` the context is cut at fixed positions into chunks that are put together
in order, whichever programs computed them, so that no row's arithmetic depends on its neighbours.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout
from deepinfer_nvidia_sm100 import tables

from .attention_kernel import attention_kernel, combine_kernel
from .dependent import dependent
from .fixed_attention import fixed_attention_kernel
from .shapes import power_of_two

FIXED_CHUNK = 256
"""Tokens of a chunk under ``batch_invariant``."""
LEAST_CHUNK = 64
"""Tokens below which another split costs more than it saves."""
MOST_MERGED = 4
"""Programs of a tile up to which the last to arrive puts chunks together; more are left to a launch of their own."""
PROGRAMS_EACH = 3
"""Programs for each multiprocessor that splitting aims at."""


@attrs.frozen(kw_only=True)
class Shape:
    """Tile sizes of one launch: BLOCK_M rows times heads, BLOCK_N tokens, warps, pipeline stages."""

    rows: int
    tokens: int
    warps: int
    stages: int


@attrs.frozen(kw_only=True)
class Launch:
    """One launch of a step. ``tiles`` ``[n, 3]`` int32 (request, first row, rows), or None: tile i is row i."""

    shape: Shape
    tiles: torch.Tensor | None
    count: int
    splits: int
    most_chunks: int


@attrs.frozen(kw_only=True)
class Plan:
    """What a step reads, for every layer of the group."""

    layout: StepLayout
    launches: tuple[Launch, ...]


class Paged:
    """``softmax(scale * q k^T) v`` over the visible positions of each row."""

    def __init__(self, request: PagedAttentionRequest, context: BuildContext) -> None:
        self._request = request
        self._fixed = "batch_invariant" in request.demands
        self._device = context.device
        self._group = request.q_heads // request.kv_heads
        self._arrived = torch.zeros(context.max_tokens * request.kv_heads, dtype=torch.int32, device=context.device)
        self._programs = PROGRAMS_EACH * _multiprocessors(context.device)
        wide = request.head_dim > 128 or request.dtype == "float32"
        tokens = 32 if wide else 64
        least = max(16, 1 << (self._group - 1).bit_length())
        single = request.dtype == "float32"
        few = least
        # Two warps a program: many small programs keep more loads in flight than few large ones. With one warp, and
        # prompts with 128 tokens at a time, a little faster still, registers spill.
        self._few = (
            Shape(rows=few, tokens=tokens, warps=8, stages=2 if wide else 3)
            if few > 32
            else Shape(rows=few, tokens=tokens, warps=4 if wide else 2, stages=2 if wide else 3)
        )
        if request.cache_dtype == "float8_e4m3fn" and not wide and few <= 32 and not self._fixed:
            # Half the bytes a token: more of them on their way.
            self._few = Shape(rows=few, tokens=64, warps=2, stages=5)
        self._many = (
            Shape(rows=max(32 if single else 64, least), tokens=32, warps=8, stages=2)
            if wide
            # With two sums, a chunk's and the whole one, a tile of 64 rows and four warps spills registers.
            else Shape(rows=max(128, least), tokens=64, warps=8, stages=2)
            if self._fixed
            else Shape(rows=max(64, least), tokens=64, warps=4, stages=3)
        )
        if self._fixed and single:
            self._few = self._many  # in float32 a sum's order follows the tile: all rows go through tiles of one size
        self._several = self._few
        if self._fixed and self._few.warps == 2:
            # Under two warps the fixed chunks of several rows of a request spill registers; on 10.x those of one do.
            self._several = attrs.evolve(self._few, warps=4)
            if tables.architecture(context.device).startswith("sm_10"):
                self._few = self._several
                self._many = attrs.evolve(self._many, rows=max(64, least))

    def plan(self, layout: StepLayout) -> Plan:
        """Tiles, from the host copies of the step's layout. A step of single rows needs none."""
        counts = layout.host_query_lens
        if layout.max_query_len <= 1 and len(counts) == len(layout.positions):
            launches = [self._launch(self._few, None, len(counts), layout.max_seq_len, True)] if len(counts) else []
            return Plan(layout=layout, launches=tuple(launches))
        few = self._few.rows // self._group
        is_few = counts <= few
        starts = np.cumsum(counts) - counts
        launches = []
        for chosen, shape, split in ((is_few, self._several, True), (~is_few, self._many, False)):
            tiles = _tiles(counts, starts, chosen & (counts > 0), shape.rows // self._group)
            if len(tiles):
                longest = int(layout.host_seq_lens[chosen].max())
                launches.append(self._launch(shape, self._upload(tiles), len(tiles), longest, split))
        return Plan(layout=layout, launches=tuple(launches))

    def run(
        self, query: torch.Tensor, cache: LayerCache, plan: Plan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``query [T, q_heads, head_dim]`` -> the same shape and dtype, fresh memory."""
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for launch in plan.launches:
            self._run(query, cache, plan.layout, launch, sinks, out)
        return out

    def _launch(self, shape: Shape, tiles: torch.Tensor | None, count: int, longest: int, split: bool) -> Launch:
        """How often the context is split: enough programs to fill the device, none with too little to do."""
        wanted = round(self._programs / (count * self._request.kv_heads))
        window = self._request.window
        span = longest if window is None else min(longest, window + shape.rows + FIXED_CHUNK)
        most = max(1, -(-span // (FIXED_CHUNK if self._fixed else LEAST_CHUNK)))
        if self._fixed and window is not None:
            most += 1  # a window may begin within a chunk
        splits = max(1, min(wanted, most)) if split else 1
        return Launch(
            shape=shape,
            tiles=tiles,
            count=count,
            splits=splits,
            most_chunks=most if self._fixed else splits,
        )

    def _run(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        layout: StepLayout,
        launch: Launch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        request, shape = self._request, launch.shape
        tokens = shape.rows // self._group
        if launch.tiles is None:
            tokens = 1
        split = launch.splits > 1
        merge = split and launch.tiles is None and launch.count * request.kv_heads <= len(self._arrived)
        merge = merge and launch.splits <= MOST_MERGED
        partial = lse = out
        if split:
            members = launch.count * request.kv_heads * tokens * self._group
            partial = query.new_empty((members, launch.most_chunks, request.head_dim), dtype=torch.float32)
            lse = query.new_empty((members, launch.most_chunks), dtype=torch.float32)
        common: dict[str, Any] = {
            "most_chunks": launch.most_chunks,
            "splits": launch.splits,
            "Q_HEADS": request.q_heads,
            "KV_HEADS": request.kv_heads,
            "HEAD_DIM": request.head_dim,
            "TOKENS": tokens,
            "BLOCK_N": shape.tokens,
            "WINDOW": request.window or 0,
            "SINKS": sinks is not None,
            "IDENTITY": launch.tiles is None,
            **dependent(query),
        }
        some = out if sinks is None else sinks
        tiles = layout.positions if launch.tiles is None else launch.tiles
        more: dict[str, Any] = {
            "BLOCK_M": shape.rows,
            "BLOCK_SIZE": request.block_size,
            "SPLIT": split,
            "MERGE": merge,
            "SOFTCAP": request.softcap is not None,
            "PRECISION": "ieee" if request.dtype == "float32" else "tf32",
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }
        given = (
            query, cache["key"], cache["value"], out, partial, lse, self._arrived, some, layout.block_table,
            layout.positions, tiles, query.stride(0), query.stride(1), layout.block_table.stride(0), request.scale,
            request.softcap or 0.0,
        )  # fmt: skip
        grid = (launch.count, request.kv_heads, launch.splits)
        chunk = FIXED_CHUNK if self._fixed else LEAST_CHUNK
        if self._fixed:
            fixed: dict[str, Any] = {"CHUNK": chunk, "GROUP_BLOCK": power_of_two(self._group)}
            fixed_attention_kernel[grid](*given, SUM_BY_UNIT=request.dtype != "float32", **fixed, **common, **more)
        else:
            attention_kernel[grid](*given, chunk=chunk, **common, **more)
        if split and not merge:
            many = launch.most_chunks > 16
            combine_kernel[(launch.count, request.kv_heads * tokens * self._group)](
                partial,
                lse,
                out,
                some,
                layout.positions,
                tiles,
                chunk=chunk,
                FIXED=self._fixed,
                TOGETHER=8 if self._fixed else 64 if many else 16,
                num_warps=1 if self._fixed else 4 if many else 2,
                **common,
            )

    def _upload(self, tiles: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(tiles)
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)


def _tiles(
    counts: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any], rows: int
) -> np.ndarray[Any, Any]:
    """``[n, 3]`` int32: the chosen requests' rows in tiles of at most ``rows``."""
    owners = np.nonzero(chosen)[0]
    pieces = -(-counts[owners] // rows)
    request = np.repeat(owners, pieces)
    number = np.arange(len(request)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = starts[request] + number * rows
    size = np.minimum(rows, counts[request] - number * rows)
    return np.ascontiguousarray(np.stack((request, first, size), axis=1).astype(np.int32))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter's tests
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
