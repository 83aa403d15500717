"""The attention part of ``gpu_ops.py``: decode rows beside torch's ``scaled_dot_product_attention``, prompts, tiles.

torch gets keys and values of the same type and number in one piece, ``enable_gqa``, and every one of its backends that
takes them, in both orders of heads and tokens; the fastest counts. All are recorded in graphs and timed in turns, over
inputs that rotate so that the second-level cache holds none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gpu_common import Results, build, compile_all

from deepinfer_core.api import PagedAttentionRequest, StepLayout

DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
DECODE_SIZES = (
    (1, 1024),
    (1, 8192),
    (1, 131072),
    (8, 544),
    (8, 1024),
    (8, 8192),
    (16, 4096),
    (24, 1024),
    (32, 544),
    (32, 2048),
    (64, 544),
    (64, 1024),
    (64, 8192),
    (256, 1024),
    (256, 4096),
)
"""Requests and tokens of context."""
MIXED = tuple(length + 60 for length in (64, 512, 64, 2048, 128, 4096, 256, 1024)) * 8
"""Contexts of 64 requests side by side, 1,084 tokens on average."""
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
"""Of torch; its own choice beside them. The formula written out is slower than all at every size."""


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
    contexts: Sequence[int],
    bandwidth: float,
    shape: Any = None,
    sdpa: bool = True,
    kept: str = "bfloat16",
) -> dict[str, Any]:
    """Microseconds of one layer's attention for single rows, against the bytes of keys and values.

    ``sdpa``: beside torch's, for contexts of one length.
    """
    from deepinfer_nvidia_sm100.measure import rotations, side_by_side

    op = build(attention_request(cache_dtype=kept))
    if shape is not None:
        op._few = op._alone = shape
    batch, where = len(contexts), layout([1] * len(contexts), list(contexts))
    dtype: torch.dtype = getattr(torch, kept)
    size = sum(contexts) * KV_HEADS * DIM * 2 * dtype.itemsize
    sets = min(rotations(size), max(1, int(30e9 // size)))
    blocks = sum(-(-context // BLOCK) for context in contexts) + 1
    caches = [
        {n: torch.randn((blocks, BLOCK, KV_HEADS, DIM), device="cuda", dtype=DTYPE).to(dtype) for n in ("key", "value")}
        for _ in range(sets)
    ]
    query = torch.randn((batch, HEADS, DIM), device="cuda", dtype=DTYPE)
    plan = op.plan(where)
    ways: dict[str, list[Callable[[], object]]] = {"us": [lambda c=c: op.run(query, c, plan) for c in caches]}
    if sdpa:
        ways |= library(query, caches, contexts[0])
    spent = side_by_side(ways)
    us, floor = spent.pop("us"), size / bandwidth * 1e6
    result: dict[str, Any] = {"us": us, "floor_us": floor, "of_bandwidth": floor / us}
    return result | ({"sdpa_us": min(spent.values()), "sdpa": spent} if sdpa else {})


def library(
    query: torch.Tensor, caches: Sequence[Mapping[str, torch.Tensor]], context: int
) -> dict[str, list[Callable[[], object]]]:
    """Ways of torch to do the same, by backend and order; those that refuse are left out."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, wide = query.shape[0], query[:, :, None]
    by_token = [
        [
            c[n].flatten(0, 1)[: batch * context].view(batch, context, KV_HEADS, DIM).transpose(1, 2)
            for n in ("key", "value")
        ]
        for c in caches
    ]
    by_head = [[tensor.contiguous() for tensor in pair] for pair in by_token]
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(name: str, key: torch.Tensor, value: torch.Tensor) -> object:
        if name == "own choice":
            return attend(wide, key, value, enable_gqa=True)
        with sdpa_kernel(getattr(SDPBackend, name)):
            return attend(wide, key, value, enable_gqa=True)

    ways: dict[str, list[Callable[[], object]]] = {}
    for name in ("own choice", *BACKENDS):
        for order, pairs in (("tokens first", by_token), ("heads first", by_head)):
            try:
                call(name, *pairs[0])
            except RuntimeError:
                continue
            ways[f"{name}, {order}"] = [lambda n=name, k=k, v=v: call(n, k, v) for k, v in pairs]
    return ways


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
        Shape(rows=8, tokens=tokens, warps=warps, stages=stages, turned=True)
        for tokens, warps, stages in (
            (32, 2, 2),
            (32, 2, 3),
            (32, 2, 4),
            (32, 4, 4),
            (64, 2, 2),
            (64, 2, 3),
            (64, 4, 2),
            (64, 4, 3),
            (128, 4, 2),
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
                return decode_attention([c] * b, bandwidth, s, False)

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
    op._few = op._alone = shape
    _attend_small(op, layout([1] * batch, [4096 if batch == 1 else 64] * batch))


def prefill_call(shape: Any) -> None:
    op = build(attention_request())
    op._many = shape
    _attend_small(op, layout([64], [64]))


def _attend_small(op: Any, where: StepLayout) -> None:
    cache = {n: torch.zeros((8, BLOCK, KV_HEADS, DIM), device="cuda", dtype=DTYPE) for n in ("key", "value")}
    query = torch.zeros((len(where.positions), HEADS, DIM), device="cuda", dtype=DTYPE)
    op.run(query, cache, op.plan(where))


def measure(results: Results, bandwidth: float, quick: bool) -> list[list[Any]]:
    """Decode rows and prompts; rows of a table."""
    rows: list[list[Any]] = []
    for batch, context in DECODE_SIZES[::3] if quick else DECODE_SIZES:
        key = f"decode {batch}x{context}"
        found = results.measure(key, lambda b=batch, c=context: decode_attention([c] * b, bandwidth))
        rows.append([key, found.get("us"), found.get("of_bandwidth"), found.get("sdpa_us")])
    found = results.measure("decode 64 mixed", lambda: decode_attention(MIXED, bandwidth, sdpa=False))
    rows.append(["decode 64 mixed", found.get("us"), found.get("of_bandwidth"), None])
    for tokens, before in ((2048, 0), (2048, 6144)):
        key = f"prompt {tokens}+{before}"
        found = results.measure(key, lambda t=tokens, b=before: prefill_attention(t, b))
        rows.append([key, found.get("us"), None, None, found.get("tflops")])
    return rows
