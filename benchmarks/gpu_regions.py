"""Regions of the NVIDIA backend on a GPU, each beside its parts: the Qwen3-4B shape in bfloat16.

``python benchmarks/gpu_regions.py --out results`` (half a minute). Times are microseconds of one layer's work among
others in a recorded graph, as a decode step runs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, print_table
from gpu_attention import BLOCK, DIM, HEADS, KV_HEADS, layout
from gpu_common import Results, build, compile_all, require_gpu
from gpu_ops import HIDDEN, INNER

from deepinfer_core.api import (
    AttentionInputsRequest,
    GatedLinearRequest,
    LinearRequest,
    RmsNormRequest,
    RopeRequest,
    SwigluRequest,
    WriteKVRequest,
)

ROWS = (1, 8, 64, 256, 2048)
COMMON: dict[str, Any] = {"dtype": "bfloat16", "device_type": "cuda"}
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
Calls = list[Callable[[], object]]


def attention_inputs(rows: int) -> tuple[Calls, Calls]:
    """The region and its five parts. Inputs stay in the cache, where the product before has just put them."""
    rope: dict[str, Any] = {"theta": 1e6, "max_positions": 4096}
    cached: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "cache_dtype": "bfloat16", "block_size": BLOCK}
    region = build(AttentionInputsRequest(cache_group="full", q_heads=HEADS, norm_eps=1e-6, **rope, **cached, **COMMON))
    norm = build(RmsNormRequest(hidden=DIM, eps=1e-6, **COMMON))
    turn = build(RopeRequest(head_dim=DIM, rotary_dim=DIM, **rope, **COMMON))
    write = build(WriteKVRequest(cache_group="full", **cached, **COMMON))
    where = layout([1] * rows, [512] * rows)
    blocks = rows * (512 // BLOCK) + 1
    qkv = torch.randn(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    q_norm, k_norm = (torch.randn(DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cache = {
        n: torch.zeros((blocks, BLOCK, KV_HEADS, DIM), dtype=torch.bfloat16, device="cuda") for n in ("key", "value")
    }

    def parts() -> None:
        query, key, value = qkv.view(rows, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        query, key = norm.run(query, q_norm), norm.run(key, k_norm)
        query, key = turn.run(query, where.positions), turn.run(key, where.positions)
        write.run(key, value, cache, where)

    plan = region.plan(where)
    return [lambda: region.run(qkv, cache, plan, q_norm, k_norm)] * 16, [parts] * 16


def gated_linear(rows: int) -> tuple[Calls, Calls]:
    """The region and its two parts, over weights that keep each other out of the cache."""
    region = build(GatedLinearRequest(in_features=HIDDEN, width=INNER, weight_dtype="bfloat16", **COMMON))
    linear = build(
        LinearRequest(
            in_features=HIDDEN, out_features=2 * INNER, out_dtype="bfloat16", weight_dtype="bfloat16", **COMMON
        )
    )
    swiglu = build(SwigluRequest(width=INNER, **COMMON))
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(2 * INNER, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    packed = [(region.prepare([w]), linear.prepare([w])) for w in weights]

    def fused(weight: Any) -> Callable[[], object]:
        return lambda: region.run(x, weight)

    def parts(weight: Any) -> Callable[[], object]:
        return lambda: swiglu.run(linear.run(x, weight))

    return [fused(a) for a, _ in packed], [parts(b) for _, b in packed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one number of rows")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_regions")
    from deepinfer_nvidia_sm100.measure import microseconds

    results = Results(options.out / "gpu_regions.json")
    counts = ROWS[:1] if options.quick else ROWS
    made = {(f.__name__, rows): f(rows) for f in (attention_inputs, gated_linear) for rows in counts}
    compile_all(calls[0] for pair in made.values() for calls in pair)

    def times(region: Calls, parts: Calls) -> dict[str, float]:
        return {"us": microseconds(region), "parts_us": microseconds(parts)}

    table = []
    for (name, rows), pair in made.items():
        found = results.measure(f"{name} {rows}", lambda p=pair: times(*p))
        table.append([name, rows, found.get("us"), found.get("parts_us")])
    print_table(["region", "rows", "us", "its parts, us"], table)
    finish(results.entries, options.json)


if __name__ == "__main__":
    sys.exit(main())
