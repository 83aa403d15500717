"""Operators of the NVIDIA backend on a GPU, each against its floor and against a library, within one run.

Every measurement is written to ``--out`` as it comes, and one that is there already is not repeated: run it again after
an interruption. ``python benchmarks/gpu_ops.py --out results``; ``--only attention`` for a part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_fp8
import gpu_read
import gpu_sampling
import numpy as np
import torch
from common import finish, print_table
from gpu_common import Results, build, compile_all, require_gpu

from deepinfer_core.api import (
    PagedAttentionRequest,
    RmsNormRequest,
    RopeRequest,
    StepLayout,
    SwigluRequest,
)

DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, BLOCK = 32, 8, 128, 2560, 9728, 151936, 16
SHAPES = {
    "qkv": (6144, HIDDEN, "bfloat16"),
    "attention_out": (HIDDEN, HEADS * DIM, "bfloat16"),
    "gate_up": (2 * INNER, HIDDEN, "bfloat16"),
    "down": (HIDDEN, INNER, "bfloat16"),
    "head": (VOCAB, HIDDEN, "float32"),
}
"""Weights of the Qwen3-4B shape."""
DECODE_SIZES = (
    (1, 1024),
    (1, 8192),
    (1, 131072),
    (8, 1024),
    (8, 8192),
    (64, 1024),
    (64, 8192),
    (256, 1024),
    (256, 4096),
)
"""Requests and tokens of context."""


def layout(counts: list[int], contexts: list[int]) -> StepLayout:
    """A step over shuffled blocks."""
    blocks = [-(-c // BLOCK) for c in contexts]
    pool = torch.randperm(sum(blocks), dtype=torch.int32) + 1
    table = torch.zeros((len(counts), max(blocks)), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(blocks):
        table[row, :count] = pool[taken : taken + count]
        taken += count
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(counts, contexts, strict=True)])
    return StepLayout(
        block_size=BLOCK,
        cu_seqlens=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        positions=positions.cuda(),
        block_table=table.cuda(),
        slot_mapping=torch.zeros(sum(counts), dtype=torch.int64, device="cuda"),
        host_query_lens=np.array(counts, np.int32),
        host_seq_lens=np.array(contexts, np.int32),
        max_query_len=max(counts),
        max_seq_len=max(contexts),
    )


def attention_request(**changes: Any) -> PagedAttentionRequest:
    fields: dict[str, Any] = {
        "cache_group": "full",
        "q_heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": DIM,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "scale": DIM**-0.5,
        "block_size": BLOCK,
        "device_type": "cuda",
    }
    return PagedAttentionRequest(**(fields | changes))


def decode_attention(
    batch: int,
    context: int,
    bandwidth: float,
    shape: Any = None,
    sdpa: bool = True,
    kept: str = "bfloat16",
) -> dict[str, Any]:
    """Microseconds of one layer's attention for single rows, against the bytes of keys and values."""
    from deepinfer_nvidia_sm100.measure import microseconds, rotations

    op = build(attention_request(cache_dtype=kept))
    if shape is not None:
        op._few = shape
    where = layout([1] * batch, [context] * batch)
    dtype: torch.dtype = getattr(torch, kept)
    size = batch * context * KV_HEADS * DIM * 2 * dtype.itemsize
    sets = min(rotations(size), max(1, int(30e9 // size)))
    blocks = batch * -(-context // BLOCK) + 1
    caches = [
        {n: torch.randn((blocks, BLOCK, KV_HEADS, DIM), device="cuda", dtype=DTYPE).to(dtype) for n in ("key", "value")}
        for _ in range(sets)
    ]
    query = torch.randn((batch, HEADS, DIM), device="cuda", dtype=DTYPE)
    plan = op.plan(where)
    spent = microseconds([lambda c=c: op.run(query, c, plan) for c in caches])
    result = {"us": spent, "floor_us": size / bandwidth * 1e6, "of_bandwidth": size / bandwidth * 1e6 / spent}
    if sdpa:
        dense = [
            [
                c[n][: batch * context // BLOCK].view(batch, context, KV_HEADS, DIM).transpose(1, 2)
                for n in ("key", "value")
            ]
            for c in caches
        ]
        wide = query[:, :, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        calls = [lambda k=k, v=v: attend(wide, k, v, enable_gqa=True) for k, v in dense]
        result["sdpa_us"] = microseconds(calls)
    return result


def prefill_attention(tokens: int, before: int, shape: Any = None) -> dict[str, Any]:
    from deepinfer_nvidia_sm100.measure import microseconds

    op = build(attention_request())
    if shape is not None:
        op._many = shape
    context = tokens + before
    where = layout([tokens], [context])
    cache = {
        n: torch.randn((context // BLOCK + 1, BLOCK, KV_HEADS, DIM), device="cuda", dtype=DTYPE)
        for n in ("key", "value")
    }
    query = torch.randn((tokens, HEADS, DIM), device="cuda", dtype=DTYPE)
    plan = op.plan(where)
    spent = microseconds([lambda: op.run(query, cache, plan)])
    operations = 4 * HEADS * DIM * (tokens * before + tokens * (tokens + 1) / 2)
    return {"us": spent, "tflops": operations / spent / 1e6}


def tile_shapes(results: Results, bandwidth: float) -> list[list[Any]]:
    """Decode and prompt attention by other tiles than the operator's own."""
    from deepinfer_nvidia_sm100.ops.paged_attention import Shape

    few = [
        Shape(rows=16, tokens=tokens, warps=warps, stages=stages)
        for tokens, warps, stages in (
            (32, 1, 4),
            (32, 2, 4),
            (32, 4, 5),
            (64, 2, 3),
            (64, 2, 4),
            (64, 4, 2),
            (64, 4, 3),
            (64, 4, 4),
            (64, 4, 5),
            (128, 4, 3),
            (128, 4, 4),
            (128, 8, 3),
        )
    ]
    many = [
        Shape(rows=rows, tokens=tokens, warps=warps, stages=stages)
        for rows, tokens, warps, stages in (
            (64, 64, 4, 3),
            (64, 64, 4, 4),
            (64, 128, 4, 3),
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
            (128, 128, 8, 4),
            (128, 32, 4, 4),
        )
    ]
    sizes = ((1, 8192), (8, 2048), (64, 1024), (256, 1024))
    calls = [(lambda s=s, b=b: decode_call(b, s)) for s in few for b in (1, 300)]
    compile_all([*calls, *((lambda s=s: prefill_call(s)) for s in many)])
    rows: list[list[Any]] = []
    for shape in few:
        for batch, context in sizes:
            key = f"shape {shape.tokens},{shape.warps},{shape.stages} {batch}x{context}"

            def one(b: int = batch, c: int = context, s: Shape = shape) -> dict[str, Any]:
                return decode_attention(b, c, bandwidth, s, False)

            found = results.measure(key, one)
            rows.append([key, found.get("us"), found.get("of_bandwidth")])
    for shape in many:
        key = f"shape {shape.rows},{shape.tokens},{shape.warps},{shape.stages} prompt"
        found = results.measure(key, lambda s=shape: prefill_attention(2048, 2048, s))
        rows.append([key, found.get("us"), None, None, found.get("tflops")])
    return rows


def decode_call(batch: int, shape: Any) -> None:
    """One launch of decode attention over a small cache, to compile it."""
    op = build(attention_request())
    op._few = shape
    _attend_small(op, layout([1] * batch, [4096 if batch == 1 else 64] * batch))


def prefill_call(shape: Any) -> None:
    op = build(attention_request())
    op._many = shape
    _attend_small(op, layout([64], [64]))


def _attend_small(op: Any, where: StepLayout) -> None:
    cache = {n: torch.zeros((8, BLOCK, KV_HEADS, DIM), device="cuda", dtype=DTYPE) for n in ("key", "value")}
    query = torch.zeros((len(where.positions), HEADS, DIM), device="cuda", dtype=DTYPE)
    op.run(query, cache, op.plan(where))


def tile_of_table(name: str, rows: int) -> Any:
    """What the package's table says; None is cuBLAS, as for all numbers of rows that are not in it."""
    from deepinfer_nvidia_sm100.tables import linear_tile

    found = linear_tile(torch.device("cuda", torch.cuda.current_device()), *SHAPES[name][:2], rows)
    return None if found == "thumb" else found


def linear(name: str, rows: int, bandwidth: float, tuner: Any, tables: bool) -> dict[str, Any]:
    shape = SHAPES[name]
    if tables:
        tile = tile_of_table(name, rows)
        found = tuner.best(shape, rows, tiles=[] if tile is None else [tile])
        found = {"rows": rows, "cublas_us": found["cublas_us"], "tile": tile} | {
            "us": found["cublas_us"] if tile is None else found["few_rows_us"]
        }
    else:
        found = tuner.best(shape, rows)
    found["read_us"] = gpu_read.read_us(2 * shape[0] * shape[1])
    floor = 2 * shape[0] * shape[1] / bandwidth * 1e6
    tile = found.pop("tile")
    from deepinfer_nvidia_sm100.tables import numbers_of

    numbers = None if tile is None else numbers_of(tile)
    return {**found, "tile": numbers, "of_bandwidth": floor / found["us"], "shape": f"{shape[0]}x{shape[1]}"}


def save_table(results: Results, path: Path) -> None:
    from deepinfer_nvidia_sm100 import tuning
    from deepinfer_nvidia_sm100.tables import tile_of

    shapes: dict[str, list[dict[str, Any]]] = {}
    for key, found in results.entries.items():
        if key.startswith("linear ") and "tile" in found:
            numbers = found["tile"]
            tile = None if numbers is None else tile_of(numbers)
            shapes.setdefault(found["shape"], []).append({"rows": found["rows"], "tile": tile})
    tuning.save(path, {shape: tuning.entries(answers) for shape, answers in shapes.items()})


def pointwise(bandwidth: float, rows: int = 4096) -> dict[str, Any]:
    from deepinfer_nvidia_sm100.measure import microseconds, rotations

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=DTYPE)

    result: dict[str, Any] = {}

    def record(name: str, bytes_each: int, make: Callable[[], Callable[[], object]]) -> None:
        calls = [make() for _ in range(rotations(bytes_each, 16))]
        spent = microseconds(calls)
        result[name] = {"us": spent, "of_bandwidth": bytes_each / bandwidth * 1e6 / spent}

    norm = build(RmsNormRequest(hidden=HIDDEN, eps=1e-6, dtype="bfloat16", device_type="cuda"))
    weight = normal(HIDDEN)

    def make_norm() -> Callable[[], object]:
        x = normal(rows, HIDDEN)
        return lambda: norm.run(x, weight)

    def make_add() -> Callable[[], object]:
        x, residual = normal(rows, HIDDEN), normal(rows, HIDDEN)
        return lambda: norm.add(x, residual, weight)

    record("rms_norm", 4 * rows * HIDDEN, make_norm)
    record("rms_norm.add", 8 * rows * HIDDEN, make_add)
    rope = build(
        RopeRequest(head_dim=DIM, rotary_dim=DIM, theta=1e6, dtype="bfloat16", max_positions=8192, device_type="cuda")
    )
    positions = torch.arange(rows, device="cuda")

    def make_rope() -> Callable[[], object]:
        x = normal(rows, HEADS, DIM)
        return lambda: rope.run(x, rope.plan(positions))

    record("rope", 4 * rows * HEADS * DIM, make_rope)
    swiglu = build(SwigluRequest(width=INNER, dtype="bfloat16", device_type="cuda"))

    def make_swiglu() -> Callable[[], object]:
        x = normal(rows, 2 * INNER)
        return lambda: swiglu.run(x)

    record("swiglu", 6 * rows * INNER, make_swiglu)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument(
        "--only", nargs="*", help="attention, linear, fp8, pointwise, sampling; shapes: tiles of attention"
    )
    parser.add_argument("--save-table", type=Path, help="file of tuned tiles that the linear part's answers go to")
    parser.add_argument(
        "--tables", action="store_true", help="products by the tiles of the package's tables, instead of trying all"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_ops")
    from deepinfer_nvidia_sm100 import tuning
    from deepinfer_nvidia_sm100.measure import copy_bandwidth, matrix_rate

    parts = set(options.only or ("attention", "linear", "fp8", "pointwise", "sampling"))
    results = Results(options.out / "gpu_ops.json")
    began = time.monotonic()
    ceilings = results.measure("ceilings", lambda: {"copy": copy_bandwidth(), "bf16": matrix_rate()})
    bandwidth = float(ceilings["copy"])
    print(f"copy {bandwidth / 1e9:,.0f} GB/s, bf16 {ceilings['bf16'] / 1e12:,.0f} TFLOP/s", flush=True)
    rows: list[list[Any]] = []
    if "pointwise" in parts:
        found = results.measure("pointwise", lambda: pointwise(bandwidth))
        rows += [[name, v["us"], v["of_bandwidth"]] for name, v in found.items() if isinstance(v, dict)]
    if "attention" in parts:
        sizes = [
            (1, 1024),
            (1, 8192),
            (1, 131072),
            (8, 1024),
            (8, 8192),
            (64, 1024),
            (64, 8192),
            (256, 1024),
            (256, 4096),
        ]
        for batch, context in sizes[::3] if options.quick else sizes:
            key = f"decode {batch}x{context}"
            found = results.measure(key, lambda b=batch, c=context: decode_attention(b, c, bandwidth))
            rows.append([key, found.get("us"), found.get("of_bandwidth"), found.get("sdpa_us")])
        for tokens, before in ((2048, 0), (2048, 6144)):
            key = f"prompt {tokens}+{before}"
            found = results.measure(key, lambda t=tokens, b=before: prefill_attention(t, b))
            rows.append([key, found.get("us"), None, None, found.get("tflops")])
    if "shapes" in parts:
        rows += tile_shapes(results, bandwidth)
    if "linear" in parts:
        tuner = tuning.Tuner()
        counts = (1, 8, 64) if options.quick else (1, 16, 64, 512, 2048) if options.tables else tuning.ROWS
        if options.tables:
            asked = [(SHAPES[name], count, tile_of_table(name, count)) for name in SHAPES for count in counts]
            tuner.compile_tiles([item for item in asked if item[2] is not None])
        else:
            tuner.compile(SHAPES.values(), counts)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        for name in SHAPES:
            for count in counts:
                key = f"linear {name} {count}"
                found = results.measure(key, lambda n=name, c=count: linear(n, c, bandwidth, tuner, options.tables))
                rows.append(
                    [key, found.get("us"), found.get("of_bandwidth"), found.get("cublas_us"), None, found.get("tile")]
                )
        if options.save_table:
            save_table(results, options.save_table)
    if "fp8" in parts:

        def attend(requests: int, context: int, bandwidth: float, kept: str) -> dict[str, Any]:
            return decode_attention(requests, context, bandwidth, sdpa=False, kept=kept)

        rows += gpu_fp8.measure(results, bandwidth, options.quick, options.tables, attend)
        if options.save_table:
            gpu_fp8.save_table(results, options.save_table)
    if "sampling" in parts:
        rows += gpu_sampling.measure(results, bandwidth, options.quick)
    width = max((len(row) for row in rows), default=0)
    print_table(
        ["operator", "us", "of bandwidth", "library us", "TFLOP/s, passes", "tile"][:width],
        [row + [None] * (width - len(row)) for row in rows],
    )
    finish(results.entries, options.json)


if __name__ == "__main__":
    sys.exit(main())
