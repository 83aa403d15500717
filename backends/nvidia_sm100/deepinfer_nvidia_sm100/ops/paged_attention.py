"""``attention.paged``: tiles, and which kernel takes them.

Rows that decode, and drafts, become small tiles whose contexts are cut into chunks on the device (:mod:`.work_list`,
:mod:`.decode_kernel`); prompt chunks become tiles of many rows (:mod:`.attention_kernel`). Under the demand
``batch_invariant`` the context is cut at fixed positions into chunks that are put together in order, whichever programs
computed them, so that no row's arithmetic depends on its neighbours.

Floor: as in :mod:`.decode_kernel` and :mod:`.attention_kernel`.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import BuildContext, LayerCache, PagedAttentionRequest, StepLayout
from deepinfer_nvidia_sm100 import tables

from .attention_kernel import attention_kernel
from .chunk_results import merge_kernel
from .decode_kernel import decode_kernel
from .dependent import dependent
from .fixed_attention import combine_kernel, fixed_attention_kernel
from .shapes import power_of_two
from .work_list import FIELDS, WorkList, work_list

FIXED_CHUNK = 256
"""Tokens of a chunk under ``batch_invariant``."""
MOST_MERGED = 4
"""Programs of a tile up to which the last to arrive puts chunks together; more are left to a launch of their own."""
PROGRAMS_EACH = 4
"""Programs for each multiprocessor that cutting contexts aims at: as many as fit, so that none has more than others."""
LEFT_OPEN = 33
"""One in so many of these places is left to the kernels beside it: steps of 8 and 16 requests are 1 % faster."""
LEFT_OPEN_ALONE = 11
"""The same for one request: a long context is read 2 to 4 % faster."""
JOINING_BYTES = 14 << 20
"""What is read in the time it takes to put chunks together, 3.5 us."""
FIXED_EACH = 3
"""The same for fixed chunks."""
MOST_PIECES = 8
"""Blocks that tokens read at once lie in, up to which they are looked up one by one."""


@attrs.frozen(kw_only=True)
class Shape:
    """Tile sizes of one launch: BLOCK_M rows times heads, BLOCK_N tokens, warps, pipeline stages; ``turned``: tokens
    are the matrix unit's rows."""

    rows: int
    tokens: int
    warps: int
    stages: int
    turned: bool = False


@attrs.frozen(kw_only=True)
class Launch:
    """One launch of a step. ``tiles`` ``[n, 3]`` int32 (request, first row, rows), or None: tile i is row i.

    ``work``: chunks of contexts, for the kernel that takes them from a list. ``splits`` programs a tile, and at most
    ``most_chunks`` chunks, for the one with fixed chunks.
    """

    shape: Shape
    tiles: torch.Tensor | None
    count: int
    work: WorkList | None = None
    splits: int = 1
    most_chunks: int = 1


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
        kept_alike = request.cache_dtype == request.dtype in ("bfloat16", "float16")
        turned = kept_alike and request.head_dim <= 128 and self._group <= 16 and request.scale > 0
        turned = turned and not self._fixed
        multiprocessors = _multiprocessors(context.device)
        self._programs = (FIXED_EACH if self._fixed else PROGRAMS_EACH) * multiprocessors
        # Programs that keep the memory busy, each with three tiles of 16 KB on their way.
        self._filling = max(1, multiprocessors * 4 // 3 // request.kv_heads)
        kept: torch.dtype = getattr(torch, request.cache_dtype)
        self._joining = JOINING_BYTES // (2 * request.kv_heads * request.head_dim * kept.itemsize)
        results = 2 * context.max_tokens + self._programs // request.kv_heads + 1
        self._arrived = torch.zeros(results * request.kv_heads, dtype=torch.int32, device=context.device)
        wide = request.head_dim > 128 or request.dtype == "float32"
        tokens = 32 if wide else 64
        least = max(16, 1 << (self._group - 1).bit_length())
        single = request.dtype == "float32"
        few = least
        # Two warps a program: many small programs keep more loads in flight than few large ones. With one warp, and
        # prompts with 128 tokens at a time, a little faster still, registers spill. Where every token is looked up as
        # it is read, as fixed chunks do, a stage more is in flight only in part; else it leaves room for less programs.
        # In float32 products are unrolled: fewer warps, or prompts with 32 tokens at once, spill. Fixed bits stay.
        stages = 3 if self._fixed and not wide else 2
        warps = 8 if few > 32 or (single and not self._fixed) else 4 if wide else 2
        self._few = Shape(rows=few, tokens=tokens, warps=warps, stages=stages)
        if request.cache_dtype == "float8_e4m3fn" and not wide and few <= 32 and not self._fixed:
            # Half the bytes a token: more of them on their way.
            self._few = Shape(rows=few, tokens=64, warps=2, stages=3)
        self._many = (
            Shape(
                rows=max(32 if single else 64, least),
                tokens=16 if single and not self._fixed else 32,
                warps=8,
                stages=2,
            )
            if wide
            # With two sums, a chunk's and the whole one, a tile of 64 rows and four warps spills registers.
            else Shape(rows=max(128, least), tokens=64, warps=8, stages=2)
            if self._fixed
            else Shape(rows=max(64, least), tokens=64, warps=4, stages=3)
        )
        if self._fixed and single:
            self._few = self._many  # in float32 a sum's order follows the tile: all rows go through tiles of one size
        self._several = self._few
        if turned:
            # Three tiles on their way, and shared memory for four programs.
            tokens = 32 if request.head_dim > 64 else 64
            self._few = Shape(rows=max(8, power_of_two(self._group)), tokens=tokens, warps=2, stages=4, turned=True)
        if self._fixed and self._few.warps == 2:
            # Under two warps the fixed chunks of several rows of a request spill registers; on 10.x those of one do.
            self._several = attrs.evolve(self._few, warps=4)
            if tables.architecture(context.device).startswith("sm_10"):
                self._few = self._several
                self._many = attrs.evolve(self._many, rows=max(64, least))
        # For one request: slower by itself, but it leaves shared memory to the kernels that come in beside it.
        self._alone = attrs.evolve(self._few, tokens=64, warps=4, stages=2) if turned else self._few

    def plan(self, layout: StepLayout) -> Plan:
        """Tiles, from the host copies of the step's layout. A step of single rows needs none."""
        counts = layout.host_query_lens
        if layout.max_query_len <= 1 and len(counts) == len(layout.positions):
            if not len(counts):
                return Plan(layout=layout, launches=())
            shape = self._alone if len(counts) == 1 else self._few
            launch = self._launch(shape, None, layout, len(counts), layout.max_seq_len, True)
            return Plan(layout=layout, launches=(launch,))
        few = self._several.rows // self._group
        is_few = counts <= few
        starts = np.cumsum(counts) - counts
        launches = []
        for chosen, shape, split in ((is_few, self._several, True), (~is_few, self._many, False)):
            tiles = _tiles(counts, starts, chosen & (counts > 0), shape.rows // self._group)
            if len(tiles):
                longest = int(layout.host_seq_lens[chosen].max())
                launches.append(self._launch(shape, self._upload(tiles), layout, len(tiles), longest, split))
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

    def _launch(
        self, shape: Shape, tiles: torch.Tensor | None, layout: StepLayout, count: int, longest: int, split: bool
    ) -> Launch:
        """How contexts are cut: enough chunks to fill the device, none with too little to do."""
        request = self._request
        if self._fixed:
            span = longest if request.window is None else min(longest, request.window + shape.rows + FIXED_CHUNK)
            most = max(1, -(-span // FIXED_CHUNK))
            if request.window is not None:
                most += 1  # a window may begin within a chunk
            wanted = round(self._programs / (count * request.kv_heads))
            splits = max(1, min(wanted, most)) if split else 1
            return Launch(shape=shape, tiles=tiles, count=count, splits=splits, most_chunks=most)
        work = None
        if split:
            open_ = LEFT_OPEN_ALONE if count == 1 and tiles is None else LEFT_OPEN
            programs = max(1, (self._programs - self._programs // open_) // request.kv_heads)
            joining = self._joining // shape.tokens
            work = work_list(
                tiles, layout.positions, count, programs, request.window or 0, shape.tokens, self._filling, joining
            )
        return Launch(shape=shape, tiles=tiles, count=count, work=work)

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
        table, tiles = layout.block_table, launch.tiles
        some = out if sinks is None else sinks
        common: dict[str, Any] = {
            "Q_HEADS": request.q_heads,
            "KV_HEADS": request.kv_heads,
            "HEAD_DIM": request.head_dim,
            "SINKS": sinks is not None,
            **dependent(query),
        }
        more: dict[str, Any] = {
            "WINDOW": request.window or 0,
            "BLOCK_M": shape.rows,
            "BLOCK_N": shape.tokens,
            "BLOCK_SIZE": request.block_size,
            "SOFTCAP": request.softcap is not None,
            "PRECISION": "ieee" if request.dtype == "float32" else "tf32",
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }
        sizes = (query.stride(0), query.stride(1), table.stride(0), request.scale, request.softcap or 0.0)
        given = (query, cache["key"], cache["value"], out)
        if self._fixed:
            self._run_fixed(launch, layout, given, some, sizes, common, more)
        elif launch.work is None:
            attention_kernel[(launch.count, request.kv_heads)](
                *given, some, table, layout.positions, tiles, *sizes, **common, **more
            )
        else:
            self._run_list(launch, launch.work, given, some, table, sizes, common, more)

    def _run_list(
        self,
        launch: Launch,
        work: WorkList,
        given: tuple[torch.Tensor, ...],
        sinks: torch.Tensor,
        table: torch.Tensor,
        sizes: tuple[Any, ...],
        common: dict[str, Any],
        more: dict[str, Any],
    ) -> None:
        request, out = self._request, given[3]
        tokens = launch.shape.rows // self._group if launch.tiles is not None else 1
        members = tokens * self._group
        partial = out.new_empty((work.bound, request.kv_heads * members, request.head_dim), dtype=torch.float32)
        lse = out.new_empty((work.bound, request.kv_heads * members), dtype=torch.float32)
        merge = launch.tiles is None and work.programs <= MOST_MERGED * launch.count
        merge = merge and work.bound * request.kv_heads <= len(self._arrived)
        pieces, rest = divmod(launch.shape.tokens, request.block_size)
        if rest or pieces > MOST_PIECES:
            pieces = 0 if request.block_size % launch.shape.tokens else 1
        decode_kernel[(work.bound * request.kv_heads,)](
            *given, partial, lse, self._arrived, sinks, table, work.entries, work.length, *sizes,
            FIELDS=FIELDS, TOKENS=tokens, PIECES=pieces, MERGE=merge, MERGED_ROWS=power_of_two(members),
            TURNED=launch.shape.turned, **common, **more,
        )  # fmt: skip
        if not merge:
            many = launch.tiles is None and work.programs > 16 * launch.count
            merge_kernel[(launch.count, request.kv_heads * members)](
                partial, lse, out, sinks, work.tiles,
                TOKENS=tokens, TOGETHER=64 if many else 16, num_warps=4 if many else 2, **common,
            )  # fmt: skip

    def _run_fixed(
        self,
        launch: Launch,
        layout: StepLayout,
        given: tuple[torch.Tensor, ...],
        sinks: torch.Tensor,
        sizes: tuple[Any, ...],
        common: dict[str, Any],
        more: dict[str, Any],
    ) -> None:
        request, out = self._request, given[3]
        tokens = 1 if launch.tiles is None else launch.shape.rows // self._group
        split = launch.splits > 1
        merge = split and launch.tiles is None and launch.count * request.kv_heads <= len(self._arrived)
        merge = merge and launch.splits <= MOST_MERGED
        partial = lse = out
        if split:
            members = launch.count * request.kv_heads * tokens * self._group
            partial = out.new_empty((members, launch.most_chunks, request.head_dim), dtype=torch.float32)
            lse = out.new_empty((members, launch.most_chunks), dtype=torch.float32)
        tiles = layout.positions if launch.tiles is None else launch.tiles
        which: dict[str, Any] = {
            "CHUNK": FIXED_CHUNK, "TOKENS": tokens, "IDENTITY": launch.tiles is None, "WINDOW": request.window or 0
        }  # fmt: skip
        fixed_attention_kernel[(launch.count, request.kv_heads, launch.splits)](
            *given, partial, lse, self._arrived, sinks, layout.block_table, layout.positions, tiles, *sizes,
            most_chunks=launch.most_chunks, splits=launch.splits, SPLIT=split, MERGE=merge,
            SUM_BY_UNIT=request.dtype != "float32", GROUP_BLOCK=power_of_two(self._group),
            **{**more, **which}, **common,
        )  # fmt: skip
        if split and not merge:
            combine_kernel[(launch.count, request.kv_heads * tokens * self._group)](
                partial, lse, out, sinks, layout.positions, tiles, most_chunks=launch.most_chunks,
                num_warps=1, **which, **common,
            )  # fmt: skip

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
