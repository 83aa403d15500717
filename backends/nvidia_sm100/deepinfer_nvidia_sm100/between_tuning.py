"""Finds tiles for ``fused.between_attention``, for :mod:`.tables`, where they stand: among the kernels of a step.

Which programs of a product come in beside those of the kernel before it decides as much as a tile by itself, so some
layers, attention and what lies between two of them, are recorded in one graph and timed whole, while one product after
another tries its tiles. Where the region with its best tiles is not faster than its parts, the table says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch
import triton

from deepinfer_core.api import (
    BetweenAttentionRequest,
    BetweenPart,
    BetweenWeights,
    BuildContext,
    PagedAttentionRequest,
    StepLayout,
)

from .measure import recorded_us, rotations
from .ops.between_attention import BetweenAttention, Tiles
from .ops.few_rows import AnyTile, Tile, launch
from .ops.normed_rows import Add, Scale
from .ops.paged_attention import Paged
from .tables import joined, numbers_of
from .tuning import NOT_DESCRIBED, SHARED_BYTES, register_candidates

ROWS: Mapping[int, int] = {16: 8, 32: 32, 64: 64}
"""Most rows of a table's entry -> the number that is measured for it."""
CONTEXT = 544
LEAST_LAYERS = 4
STEPS = ((64, 5), (64, 8), (128, 4), (128, 6))
"""Elements of K at a time, and stages of the pipeline."""
GAIN = 0.998
"""A tile replaces another where steps take less than this part of their time."""
LARGEST_DIFFERENCE = 0.2
"""Of results of whole steps, relative: more is not rounding."""
PART_SHAPES: dict[BetweenPart, tuple[str, str]] = {
    "attention_out": ("hidden", "attended"),
    "gate_up": ("gate_up", "hidden"),
    "down": ("hidden", "width"),
    "qkv": ("merged", "hidden"),
}


def requests_of(choices: list[dict[str, Any]]) -> tuple[BetweenAttentionRequest, PagedAttentionRequest] | None:
    """The region and the attention of a plan's 16-bit layers, or None: there is none, or a product's shape in it is
    another's, and a table knows products by their shapes."""
    found: dict[str, Any] = {}
    for kind in (PagedAttentionRequest, BetweenAttentionRequest):
        for choice in choices:
            fields, names = choice["request"], [field.name for field in attrs.fields(kind) if field.init]
            if choice["op"] == kind.op and fields.get("dtype") in ("bfloat16", "float16"):
                given = {name: fields[name] for name in names if name in fields} | {"demands": frozenset()}
                found.setdefault(kind.op, kind(**given))
    region, attention = found.get(BetweenAttentionRequest.op), found.get(PagedAttentionRequest.op)
    if region is None or attention is None or len({name for name, _, _ in named_shapes(region).values()}) < 4:
        return None
    if attention.q_heads * attention.head_dim != region.attended or attention.window is not None or attention.sinks:
        return None
    return region, attention


def named_shapes(request: BetweenAttentionRequest) -> dict[BetweenPart, tuple[str, int, int]]:
    """Each product's ``"NxK"``, rows and columns of its weight."""
    sizes = {name: getattr(request, name) for name in ("hidden", "attended", "width", "merged")}
    sizes["gate_up"] = 2 * request.width
    pairs = {part: (sizes[out], sizes[inner]) for part, (out, inner) in PART_SHAPES.items()}
    return {part: (f"{out}x{inner}", out, inner) for part, (out, inner) in pairs.items()}


def starting_tiles(rows: int) -> dict[BetweenPart, Tile]:
    """By rule, where the package's table has none."""
    block_m = next(size for size in (16, 32, 64) if size >= rows)
    one = Tile(block_n=64, block_m=block_m, block_k=128, splits=1, stages=4, warps=4)
    return {
        "attention_out": attrs.evolve(one, splits=2),
        "gate_up": attrs.evolve(one, block_n=128, block_k=64, stages=4),
        "down": attrs.evolve(one, splits=3),
        "qkv": one,
    }


def others(tile: AnyTile, part: BetweenPart, rows: int, inner: int) -> Iterator[AnyTile]:
    """Tiles like this one: other steps along K, by tensor descriptors or not, that let the next kernel in early or
    late. And for few rows those that hold the weight in registers."""
    yield from (other for other in register_candidates(rows, inner) if other != tile)
    if not isinstance(tile, Tile):
        tile = starting_tiles(rows)[part]
    by_descriptors = tile.block_n >= 128 if part == "gate_up" else rows > NOT_DESCRIBED // 2
    for splits in (1,) if part in ("gate_up", "qkv") else (1, 2, 3):
        for block_k, stages in STEPS:
            for described in (False, True) if by_descriptors else (False,):
                for late in (False, True):
                    sizes = {"splits": splits, "block_k": block_k, "stages": stages}
                    other = attrs.evolve(tile, described=described, late=late, **sizes)
                    if other.shared_bytes <= SHARED_BYTES and inner >= 2 * splits * block_k and other != tile:
                        yield other


def improve(
    region: BetweenAttention,
    rows: int,
    tried: Mapping[BetweenPart, Sequence[AnyTile]],
    step: Callable[[], torch.Tensor],
    spent: float,
    expected: torch.Tensor,
) -> float:
    """Give ``region.tiles[rows]`` the best of these tiles, one product after the other.

    Args:
        step: runs ``region`` for so many rows among other kernels, and gives ``expected`` but for rounding.
        spent: microseconds of ``step`` with the tiles there are.

    Returns:
        Microseconds with the best.
    """
    tiles = region.tiles[rows]
    for part, some in tried.items():
        for other in some:
            region.tiles[rows] = {**tiles, part: other}
            try:
                us, found = recorded_us(step)
            except (RuntimeError, triton.runtime.errors.OutOfResources):  # more registers or memory than there are
                continue
            if us < GAIN * spent and difference(found, expected) < LARGEST_DIFFERENCE:
                spent, tiles = us, region.tiles[rows]
    region.tiles[rows] = tiles
    return spent


class BetweenTuner:
    """Some layers of a decode step with random weights, on ``device``."""

    def __init__(
        self, request: BetweenAttentionRequest, attention: PagedAttentionRequest, device: str = "cuda"
    ) -> None:
        context = BuildContext(
            device=torch.device(device),
            max_tokens=max(ROWS),
            max_requests=max(ROWS),
            max_model_len=CONTEXT,
            num_threads=1,
            settings=None,
            reference=_no_reference,
        )
        self._request, self._attention_request = request, attention
        self._device, self._dtype = context.device, getattr(torch, request.dtype)
        self.region = BetweenAttention(request, context)
        self._attention = Paged(attention, context)
        shapes = named_shapes(request)
        size = 2 * sum(out * inner for _, out, inner in shapes.values())
        self._layers = []
        for _ in range(max(LEAST_LAYERS, rotations(size, 16))):
            weights = {
                part: self.region.prepare(part, [self._random(out, inner, scale=inner**-0.5)], self._bias(part, out))
                for part, (_, out, inner) in shapes.items()
            }
            norms = [1 + self._random(request.hidden, scale=0.2) for _ in range(2)]
            self._layers.append(
                BetweenWeights(
                    attention_out=weights["attention_out"],
                    norm=norms[0],
                    gate_up=weights["gate_up"],
                    down=weights["down"],
                    next_norm=norms[1],
                    next_qkv=weights["qkv"],
                )
            )

    def _random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=self._device) * scale).to(self._dtype)

    def _bias(self, part: BetweenPart, out: int) -> torch.Tensor | None:
        there = self._request.attention_bias if part in ("attention_out", "qkv") else self._request.mlp_bias
        return self._random(out, scale=0.02) if there else None

    def best(self, rows: int) -> tuple[Tiles | None, float, float]:
        """The region's tiles for this many rows, or None where its parts are as fast; microseconds a layer with the
        tiles, and by parts."""
        step = self._step(rows)
        tiles = self.region.tiles.pop(rows, None) or {**starting_tiles(rows)}
        by_parts, expected = recorded_us(step)
        tried = {part: list(others(tiles[part], part, rows, s[2])) for part, s in named_shapes(self._request).items()}
        self._compile(rows, tiles, tried)
        self.region.tiles[rows] = tiles
        spent, found = recorded_us(step)
        if difference(found, expected) > LARGEST_DIFFERENCE:
            raise RuntimeError(f"fused.between_attention by {tiles} differs from its parts")
        spent = improve(self.region, rows, tried, step, spent, expected)
        tiles = self.region.tiles.pop(rows)
        layers = len(self._layers)
        return (tiles if spent < GAIN * by_parts else None), spent / layers, by_parts / layers

    def entries(self, found: Mapping[int, Tiles | None]) -> dict[str, list[list[Any]]]:
        """A section of a table, of what :meth:`best` found for the numbers of rows in :data:`ROWS`."""
        return {
            name: joined(
                (most, numbers_of(tiles[part]) if (tiles := found[rows]) else None) for most, rows in ROWS.items()
            )
            for part, (name, _, _) in named_shapes(self._request).items()
        }

    def _compile(self, rows: int, tiles: Tiles, tried: Mapping[BetweenPart, list[AnyTile]]) -> None:
        """Many at a time; the compiler leaves Python free."""
        if self._device.type != "cuda":
            return
        request, arrived = self._request, torch.zeros(1, dtype=torch.int32, device=self._device)
        squares = torch.empty((triton.cdiv(request.hidden, 16), rows), device=self._device)
        residual, norm = self._random(rows, request.hidden), self._layers[0].norm
        packed = {
            "attention_out": self._layers[0].attention_out,
            "gate_up": self._layers[0].gate_up,
            "down": self._layers[0].down,
            "qkv": self._layers[0].next_qkv,
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for part, (_, out, inner) in named_shapes(request).items():
                adds, gated, weight = part in ("attention_out", "down"), part == "gate_up", packed[part]
                x = self._random(rows, inner)
                y = torch.empty((rows, out // 2 if gated else out), dtype=self._dtype, device=self._device)
                before = tiles["down" if part == "qkv" else "attention_out"]
                for tile in (tiles[part], *tried[part]):
                    launch(
                        x,
                        weight.weight,
                        weight.bias,
                        y,
                        tile,
                        arrived,
                        gated=gated,
                        limit=request.limit if gated else None,
                        add=Add(residual, norm, squares) if adds else None,
                        scale=None
                        if adds
                        else Scale(squares, triton.cdiv(request.hidden, before.block_n), request.eps),
                        compile_only=True,
                    )

    def _step(self, rows: int) -> Any:
        """A step of this many requests over all layers."""
        attention, block = self._attention_request, self._attention_request.block_size
        layout = decode_layout(rows, CONTEXT, block, self._device)
        shape = (rows * layout.block_table.shape[1] + 1, block, attention.kv_heads, attention.head_dim)
        kept = getattr(torch, attention.cache_dtype)
        caches = [{name: self._random(*shape).to(kept) for name in ("key", "value")} for _ in self._layers]
        plan = self._attention.plan(layout)
        first, start = self._random(rows, self._request.merged), self._random(rows, self._request.hidden)

        def step() -> torch.Tensor:
            qkv, residual = first, start.clone()
            for cache, weights in zip(caches, self._layers, strict=True):
                query = qkv[:, : self._request.attended].unflatten(1, (attention.q_heads, attention.head_dim))
                attended = self._attention.run(query, cache, plan).flatten(1)
                qkv, residual = self.region.run(attended, residual, weights)
            return qkv

        return step


def decode_layout(rows: int, context: int, block_size: int, device: torch.device) -> StepLayout:
    """A step of one row each of so many requests, whose blocks lie one behind the other, from block 1 on."""
    blocks = -(-context // block_size)
    table = 1 + torch.arange(rows * blocks, dtype=torch.int32, device=device).view(rows, blocks)
    return StepLayout(
        block_size=block_size,
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=device),
        seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        positions=torch.full((rows,), context - 1, dtype=torch.int64, device=device),
        block_table=table,
        slot_mapping=table[:, -1].to(torch.int64) * block_size + (context - 1) % block_size,
        host_query_lens=np.ones(rows, np.int32),
        host_seq_lens=np.full(rows, context, np.int32),
        max_query_len=1,
        max_seq_len=context,
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of ``expected``."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _no_reference(request: Any) -> Any:
    raise LookupError(f"{request.op}: there are no reference operators while tiles are measured")
