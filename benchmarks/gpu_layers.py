"""The layers of a decode step in one recorded graph, with their norms as kernels and with ``fused.between_attention``.

The shape of Qwen3-4B in bfloat16, contexts of 544 tokens, 36 layers and the output head, without sampling: products are
timed where they stand, among the kernels whose programs come in beside theirs. ``python benchmarks/gpu_layers.py --out
results``; ``--search 64`` tries other tiles for the region, one product after the other, and prints what was best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, print_table
from gpu_common import Results, build, compile_all, require_gpu
from gpu_model import QWEN3_4B, kv_bytes, weight_bytes

from deepinfer_core.api import (
    AttentionInputsRequest,
    BetweenAttentionRequest,
    BetweenPart,
    BetweenWeights,
    GatedLinearRequest,
    LinearRequest,
    PagedAttentionRequest,
    RmsNormRequest,
)

ROWS = (1, 8, 32, 64, 256)
CONTEXT = 544
BLOCK = 16
LAYERS, HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, DIM = (
    QWEN3_4B[name]
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
)
EPS = 1e-6
MERGED = (HEADS + 2 * KV_HEADS) * DIM
COMMON: dict[str, Any] = {"dtype": "bfloat16", "device_type": "cuda"}
SHAPES: dict[BetweenPart, tuple[int, int]] = {
    "attention_out": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "qkv": (MERGED, HIDDEN),
}


def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Parts:
    """:class:`~deepinfer_core.api.BetweenAttention` with norms as kernels of their own."""

    def __init__(self) -> None:
        def linear(part: BetweenPart) -> Any:
            out, inner = SHAPES[part]
            plain = {"out_dtype": "bfloat16", "weight_dtype": "bfloat16"}
            return build(LinearRequest(in_features=inner, out_features=out, **plain, **COMMON))

        gated = build(GatedLinearRequest(in_features=HIDDEN, width=INNER, weight_dtype="bfloat16", **COMMON))
        self._ops = {part: gated if part == "gate_up" else linear(part) for part in SHAPES}
        self._norm = build(RmsNormRequest(hidden=HIDDEN, eps=EPS, **COMMON))

    def prepare(self, part: BetweenPart, weights: list[torch.Tensor]) -> Any:
        return self._ops[part].prepare(weights)

    def first(self, residual: torch.Tensor, norm: torch.Tensor, qkv: Any) -> torch.Tensor:
        rows: torch.Tensor = self._ops["qkv"].run(self._norm.run(residual, norm), qkv)
        return rows

    def run(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ops = self._ops
        x, residual = self._norm.add(ops["attention_out"].run(attended, weights.attention_out), residual, weights.norm)
        x = ops["down"].run(ops["gate_up"].run(x, weights.gate_up), weights.down)
        x, residual = self._norm.add(x, residual, weights.next_norm)
        return (x if weights.next_qkv is None else ops["qkv"].run(x, weights.next_qkv)), residual


class Layers:
    """36 layers with weights of their own, and the head."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.region = build(
            BetweenAttentionRequest(
                hidden=HIDDEN,
                attended=HEADS * DIM,
                width=INNER,
                merged=MERGED,
                eps=EPS,
                weight_dtype="bfloat16",
                **COMMON,
            )
        )
        head = LinearRequest(
            in_features=HIDDEN, out_features=VOCAB, out_dtype="float32", weight_dtype="bfloat16", **COMMON
        )
        self._head = build(head)
        self._head_weight = self._head.prepare([random(VOCAB, HIDDEN)])
        rope: dict[str, Any] = {"theta": 1e6, "max_positions": 4096}
        shape: dict[str, Any] = {"head_dim": DIM, "cache_dtype": "bfloat16", "block_size": BLOCK}
        self._inputs = build(
            AttentionInputsRequest(
                cache_group="full", q_heads=HEADS, kv_heads=KV_HEADS, norm_eps=EPS, **rope, **shape, **COMMON
            )
        )
        self._attention = build(
            PagedAttentionRequest(
                cache_group="full", q_heads=HEADS, kv_heads=KV_HEADS, scale=DIM**-0.5, **shape, **COMMON
            )
        )
        self._head_norm = random(DIM, scale=1.0)
        norms = [1 + random(HIDDEN, scale=0.2) for _ in range(2 * LAYERS + 1)]
        packed = [{part: self.parts.prepare(part, [random(*SHAPES[part])]) for part in SHAPES} for _ in range(LAYERS)]
        self._first = norms[0], packed[0]["qkv"]
        self._weights = [
            BetweenWeights(
                attention_out=layer["attention_out"],
                norm=norms[2 * i + 1],
                gate_up=layer["gate_up"],
                down=layer["down"],
                next_norm=norms[2 * i + 2],
                next_qkv=packed[i + 1]["qkv"] if i + 1 < LAYERS else None,
            )
            for i, layer in enumerate(packed)
        ]

    def step(self, rows: int) -> Callable[[Any], torch.Tensor]:
        """A step of this many requests, which takes what stands between two attentions."""
        from deepinfer_nvidia_sm100.between_tuning import decode_layout

        where, blocks = decode_layout(rows, CONTEXT, BLOCK, torch.device("cuda")), CONTEXT // BLOCK
        caches = [
            {name: random(rows * blocks + 1, BLOCK, KV_HEADS, DIM, scale=1.0) for name in ("key", "value")}
            for _ in range(LAYERS)
        ]
        plans = self._inputs.plan(where), self._attention.plan(where)
        start = random(rows, HIDDEN, scale=1.0)

        def run(between: Any) -> torch.Tensor:
            residual = start.clone()
            qkv = between.first(residual, *self._first)
            for cache, weights in zip(caches, self._weights, strict=True):
                query = self._inputs.run(qkv, cache, plans[0], self._head_norm, self._head_norm)
                attended = self._attention.run(query, cache, plans[1]).view(rows, -1)
                qkv, residual = between.run(attended, residual, weights)
            logits: torch.Tensor = self._head.run(qkv, self._head_weight)
            return logits

        return run


def measured(layers: Layers, rows: int, bandwidth: float) -> dict[str, float]:
    """Milliseconds both ways, in turns, and how far apart their logits are."""
    from deepinfer_nvidia_sm100.between_tuning import difference
    from deepinfer_nvidia_sm100.measure import recorded_us

    step = layers.step(rows)
    times: dict[str, list[float]] = {"parts": [], "region": []}
    logits: dict[str, torch.Tensor] = {}
    for name in ("parts", "region", "parts", "region"):
        spent, logits[name] = recorded_us(lambda name=name: step(getattr(layers, name)), 9)
        times[name].append(spent / 1000)
    floor = (weight_bytes(QWEN3_4B) + kv_bytes(QWEN3_4B, rows * CONTEXT)) / bandwidth * 1000
    found = {name: min(each) for name, each in times.items()}
    apart = difference(logits["region"], logits["parts"])
    return {**found, "floor": floor, "of_floor": floor / found["region"], "apart": apart}


def search(layers: Layers, rows: int) -> dict[str, Any]:
    """The region's best tiles for this many rows, found one product after the other."""
    from deepinfer_nvidia_sm100.between_tuning import improve, others, starting_tiles
    from deepinfer_nvidia_sm100.measure import recorded_us
    from deepinfer_nvidia_sm100.tables import numbers_of

    region, run = layers.region, layers.step(rows)
    region.tiles.setdefault(rows, starting_tiles(rows))
    tiles = region.tiles[rows]
    tried = {part: list(others(tile, part, rows, SHAPES[part][1])) for part, tile in tiles.items()}

    def step() -> torch.Tensor:
        return run(region)

    def with_tile(part: BetweenPart, other: Any) -> Callable[[], None]:
        def call() -> None:
            region.tiles[rows] = {**tiles, part: other}
            try:
                step()
            finally:
                region.tiles[rows] = tiles

        return call

    spent, expected = recorded_us(step)
    compile_all(with_tile(part, other) for part, some in tried.items() for other in some)
    spent = improve(region, rows, tried, step, spent, expected)
    return {"ms": spent / 1000, **{part: numbers_of(tile) for part, tile in region.tiles[rows].items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="requests of a step")
    parser.add_argument("--search", type=int, nargs="*", default=(), help="numbers of requests to look for tiles for")
    parser.add_argument("--quick", action="store_true", help="one number of rows")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_layers")
    from deepinfer_nvidia_sm100.measure import copy_bandwidth

    results = Results(options.out / "gpu_layers.json")
    bandwidth = results.measure("copy", lambda: {"copy": copy_bandwidth()})["copy"]
    layers = Layers()
    table = []
    for rows in options.rows[:1] if options.quick else options.rows:
        found = results.measure(f"{rows}", lambda rows=rows: measured(layers, rows, bandwidth))
        table.append([rows, found.get("parts"), found.get("region"), found.get("floor"), found.get("of_floor")])
    for rows in options.search:
        print(rows, results.measure(f"search {rows}", lambda rows=rows: search(layers, rows)))
    print_table(["requests", "norms as kernels, ms", "region, ms", "floor", "of it"], table)
    finish(results.entries, options.json)


if __name__ == "__main__":
    sys.exit(main())
