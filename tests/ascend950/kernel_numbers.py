"""Run with TRITON_INTERPRET=1: the own kernels against the reference in float64. Prints one JSON line per case."""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs
import torch
from deepinfer_ascend950.operators.compress import Compress
from deepinfer_ascend950.operators.hyper_mix import HyperMix
from deepinfer_ascend950.operators.index_topk import IndexTopK

from ascend950.emulation import install
from ascend950.test_ascend_adapters import context, step
from deepinfer_core.api import CompressRequest, HyperConnectionRequest, IndexTopKRequest, StepLayout
from deepinfer_core.reference.compress import Compress as ReferenceCompress
from deepinfer_core.reference.hyper_connection import HyperConnection
from deepinfer_core.reference.index_topk import IndexTopK as Reference


def mix(tokens: int, streams: int, hidden: int, iterations: int, dtype: str) -> float:
    """Largest error relative to the largest value, of the mix and of both gates."""
    request = HyperConnectionRequest(
        streams=streams, hidden=hidden, iterations=iterations, eps=1e-6, norm_eps=1e-6, dtype=dtype
    )
    ours = HyperMix(request, context())
    oracle = HyperConnection(attrs.evolve(request, dtype="float64"), context())
    rows = (2 + streams) * streams
    weights = torch.randn(rows, streams * hidden) * 0.2, torch.randn(rows), torch.rand(3)
    x = torch.randn(tokens, streams, hidden).to(getattr(torch, dtype))
    found, (post, comb) = ours.mix(x, ours.prepare(*weights))
    expected, (exact_post, exact_comb) = oracle.mix(x.double(), oracle.prepare(*weights))
    errors = [
        (float((a.double() - b).abs().max() / b.abs().max()) if a.numel() else 0.0)
        for a, b in ((found, expected), (post, exact_post), (comb, exact_comb))
    ]
    return max(errors)


def choose(lengths: list[tuple[int, int]], top_k: int, rate: int, ties: bool) -> bool:
    """Whether the same entries are chosen. Keys and queries of small integers make scores exact, and ties real."""
    request = IndexTopKRequest(
        cache_group="index",
        heads=16,
        head_dim=16,
        top_k=top_k,
        rate=rate,
        dtype="float32",
        cache_dtype="float32",
        scale=0.5,
        block_size=128,
    )
    layout = step(lengths)
    tokens = len(layout.positions)
    high = 2 if ties else 60
    cache = {"key": torch.randint(-high, high, (int(layout.block_table.max()) + 1, 128 // rate, 16)).float()}
    query = torch.randint(-high, high, (tokens, 16, 16)).float()
    weights = torch.randint(-2, 3, (tokens, 16)).float()
    ours, oracle = IndexTopK(request, context()), Reference(request, context())
    found = ours.run(query, weights, cache, ours.plan(layout))
    wide = {"key": cache["key"].double()}
    return torch.equal(found, oracle.run(query.double(), weights, wide, oracle.plan(layout)))


def pool(steps: list[list[tuple[int, int]]], rate: int, overlap: bool, head_dim: int, **rounding: Any) -> float:
    """Largest error of an entry after all steps, relative to its row; NaN lies wherever nothing was written."""
    request = CompressRequest(
        cache_group="tail",
        entry_group="entries",
        entry="kv",
        head_dim=head_dim,
        rate=rate,
        overlap=overlap,
        dtype="float32",
        cache_dtype="float32",
        eps=1e-6,
        rotary_dim=16,
        theta=1e4,
        max_positions=1024,
        block_size=128,
        **rounding,
    )
    ours = Compress(request, context())
    oracle = ReferenceCompress(attrs.evolve(request, dtype="float64", cache_dtype="float64"), context())
    last = step(steps[-1])
    blocks, width = int(last.block_table.max()) + 1, head_dim * (2 if overlap else 1)
    bias, norm = torch.randn(rate, width), torch.randn(head_dim)
    found, expected = (
        (
            {name: torch.full((blocks, 128, width), torch.nan, dtype=dtype) for name in ("value", "score")},
            {"kv": torch.full((blocks, 128 // rate, head_dim), torch.nan, dtype=dtype)},
        )
        for dtype in (torch.float32, torch.float64)
    )
    for lengths in steps:
        layout = within(step(lengths), last)
        value, gate = torch.randn(len(layout.positions), width), torch.randn(len(layout.positions), width) * 3
        ours.run(value, gate, *found, ours.plan(layout, layout), bias, norm)
        oracle.run(value.double(), gate.double(), *expected, oracle.plan(layout, layout), bias.double(), norm.double())
    got, exact = found[1]["kv"].double(), expected[1]["kv"]
    assert torch.equal(got.isnan(), exact.isnan())
    written = ~exact.isnan().any(-1)
    if not written.any():
        return 0.0
    return float(((got - exact)[written].abs().amax(-1) / exact[written].abs().amax(-1)).max())


def within(layout: StepLayout, last: StepLayout) -> StepLayout:
    """A step of the same requests, in the blocks that they hold in their last one."""
    owner = torch.repeat_interleave(layout.cu_seqlens.diff().long())
    table = last.block_table.long()
    slots = table[owner, layout.positions // 128] * 128 + layout.positions % 128
    return attrs.evolve(layout, block_table=last.block_table, slot_mapping=slots)


def main() -> None:
    install()
    torch.manual_seed(int(sys.argv[1]))
    for tokens, streams, hidden, iterations, dtype in (
        (0, 4, 64, 3, "float32"),
        (1, 4, 64, 1, "float32"),
        (3, 4, 192, 20, "float32"),
        (2, 2, 64, 4, "float32"),
    ):
        line: dict[str, Any] = {"case": f"mix-{tokens}-{streams}-{hidden}-{iterations}"}
        print(json.dumps({**line, "error": mix(tokens, streams, hidden, iterations, dtype)}), flush=True)
    chunks = [[(3, 3), (130, 130), (1, 1)], [(2, 5), (1, 131), (6, 7)], [(20, 25), (3, 134), (1, 8)]]
    for rate, overlap, head_dim in ((4, True, 128), (4, True, 192), (4, False, 64), (128, False, 512)):
        print(
            json.dumps({"case": f"pool-{rate}-{overlap}", "error": pool(chunks, rate, overlap, head_dim)}), flush=True
        )
    none = [[(1, 1), (2, 2)]]
    print(json.dumps({"case": "no window closes", "error": pool(none, 4, True, 128)}), flush=True)
    for lengths, top_k, rate in (([(1, 3)], 4, 4), ([(1, 300), (3, 130)], 8, 4), ([(2, 9), (1, 128)], 64, 8)):
        for ties in (False, True):
            name = f"choose-{lengths}-{top_k}-{rate}-{ties}"
            print(json.dumps({"case": name, "same": choose(lengths, top_k, rate, ties)}), flush=True)


if __name__ == "__main__":
    main()
