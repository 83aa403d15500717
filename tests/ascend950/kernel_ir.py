"""Writes the own kernels' Triton IR into a folder: run by a Python with Triton, without the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from deepinfer_ascend950.kernels.compress import pool
from deepinfer_ascend950.kernels.hyper_mix import coefficients, gates, weighted_sum
from deepinfer_ascend950.kernels.index_scores import index_scores
from deepinfer_ascend950.operators.hyper_mix import lanes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HIDDEN, STREAMS, ROWS = 4096, 4, 32
"""DeepSeek-V4-Flash: 4 streams of 4,096 channels, 24 rows padded to 32; an indexer of 64 heads of 128, rate 4; entries
of 512 channels, of 4 tokens with overlap and of 128 without."""
POOL = {**dict.fromkeys(("value", "score"), "*fp32"), "rows": "*i64", "gap": "*fp32", "out": "*fp32"}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "coefficients": (
        coefficients,
        {"x": "*bf16", "fn": "*fp32", "z": "*fp32", "eps": "fp32"},
        {"ROWS": ROWS, "WIDTH": STREAMS * HIDDEN, "BLOCK": lanes(STREAMS * HIDDEN)},
    ),
    "gates": (
        gates,
        {**dict.fromkeys(("z", "base", "scale", "pre", "post", "comb"), "*fp32"), "eps": "fp32"},
        {"ROWS": ROWS, "M": STREAMS, "ITERATIONS": 20},
    ),
    "weighted_sum": (
        weighted_sum,
        {"x": "*bf16", "pre": "*fp32", "out": "*bf16"},
        {"M": STREAMS, "HIDDEN": HIDDEN, "BLOCK": lanes(HIDDEN)},
    ),
    "index_scores": (
        index_scores,
        {"q": "*bf16", "k": "*bf16", "w": "*fp32", "table": "*i32", "out": "*fp32", "blocks": "i32"},
        {"H": 64, "D": 128, "N": 32},
    ),
    "pool_overlap": (pool, POOL, {"RATE": 4, "OVERLAP": True, "HEAD_DIM": 512, "BLOCK": lanes(512)}),
    "pool": (pool, POOL, {"RATE": 128, "OVERLAP": False, "HEAD_DIM": 512, "BLOCK": lanes(512)}),
}


def main() -> None:
    for name, (kernel, arguments, constants) in CASES.items():
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        order = list(signature)
        source = ASTSource(
            fn=kernel, signature=signature, constexprs={(order.index(key),): value for key, value in constants.items()}
        )
        # The target names a GPU because Triton knows no other here; its IR before the backend is the same for all.
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        Path(sys.argv[1], f"{name}.ttir").write_text(compiled.asm["ttir"])


if __name__ == "__main__":
    main()
