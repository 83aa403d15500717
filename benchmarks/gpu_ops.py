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

import gpu_attention
import gpu_fp8
import gpu_read
import gpu_sampling
import torch
from common import finish, print_table
from gpu_attention import DIM, HEADS
from gpu_common import Results, build, require_gpu

from deepinfer_core.api import (
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
)

DTYPE = torch.bfloat16
HIDDEN, INNER, VOCAB = 2560, 9728, 151936
SHAPES = {
    "qkv": (6144, HIDDEN, "bfloat16"),
    "attention_out": (HIDDEN, HEADS * DIM, "bfloat16"),
    "gate_up": (2 * INNER, HIDDEN, "bfloat16"),
    "down": (HIDDEN, INNER, "bfloat16"),
    "head": (VOCAB, HIDDEN, "float32"),
}
"""Weights of the Qwen3-4B shape."""
FEW = (1, 2, 4, 8, 16, 32, 64)
PARTS = ("attention", "linear", "fp8", "pointwise", "sampling")


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
    of = {"of_bandwidth": floor / found["us"], "of_reading": found["read_us"] / found["us"]}
    return {**found, "tile": numbers, **of, "shape": f"{shape[0]}x{shape[1]}"}


def save_table(results: Results, path: Path) -> None:
    from deepinfer_nvidia_sm100 import tuning
    from deepinfer_nvidia_sm100.tables import any_tile_of

    shapes: dict[str, list[dict[str, Any]]] = {}
    for key, found in results.entries.items():
        if key.startswith("linear ") and "tile" in found:
            numbers = found["tile"]
            tile = None if numbers is None else any_tile_of(numbers)
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
        "--only",
        nargs="*",
        choices=(*PARTS, "shapes"),
        help="parts; shapes: tiles of attention, which are not measured else",
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

    parts = set(options.only or PARTS)
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
        rows += gpu_attention.measure(results, bandwidth, options.quick)
    if "shapes" in parts:
        rows += gpu_attention.tile_shapes(results, bandwidth)
    if "linear" in parts:
        tuner = tuning.Tuner()
        counts = (1, 8, 64) if options.quick else (*FEW, 512, 2048) if options.tables else tuning.ROWS
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
                    [key]
                    + [found.get(name) for name in ("us", "of_bandwidth", "cublas_us", "none", "tile", "of_reading")]
                )
        if options.save_table:
            save_table(results, options.save_table)
    if "fp8" in parts:

        def attend(requests: int, context: int, bandwidth: float, kept: str) -> dict[str, Any]:
            return gpu_attention.decode_attention([context] * requests, bandwidth, sdpa=False, kept=kept)

        rows += gpu_fp8.measure(results, bandwidth, options.quick, options.tables, attend)
        if options.save_table:
            gpu_fp8.save_table(results, options.save_table)
    if "sampling" in parts:
        rows += gpu_sampling.measure(results, bandwidth, options.quick)
    width = max((len(row) for row in rows), default=0)
    print_table(
        ["operator", "us", "of bandwidth", "library us", "TFLOP/s, passes", "tile", "of reading"][:width],
        [row + [None] * (width - len(row)) for row in rows],
    )
    finish(results.entries, options.json)


if __name__ == "__main__":
    sys.exit(main())
