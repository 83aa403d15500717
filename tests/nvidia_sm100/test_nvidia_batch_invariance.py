"""A row has the same bits alone, among few and among many, at any place: for every operator that claims it.

On a GPU bit by bit. In the interpreter products are the host's BLAS, whose rows differ by their number: those are as
close as float32 is, the rest is compared bit by bit there too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100.ops import fixed_linear
from deepinfer_nvidia_sm100.ops.fixed_gated import FixedOrderGatedLinear
from gpu_support import DEVICE, DTYPES, ON_GPU, context, here, operator, providers, same_bits
from reference_support import batch, layout
from test_nvidia_attention import attend
from test_nvidia_attention import request as attention_request
from test_nvidia_fused import inputs_request
from test_reference_attention import Scene
from toys.seeds import module_seed

from deepinfer_core.api import (
    AppendTokensRequest,
    EmbeddingRequest,
    GatedLinearRequest,
    InputIdsRequest,
    LinearRequest,
    RmsNormRequest,
    RopeRequest,
    SamplingRequest,
    SlotMappingRequest,
    SwigluRequest,
    WriteKVRequest,
)

SEED = module_seed(__name__)
CAP = frozenset({"batch_invariant"})
ROWS = 257
Run = Callable[[Sequence[int]], Sequence[torch.Tensor]]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(SEED + seed)
    return here(torch.randn(shape, generator=made).to(getattr(torch, dtype)))


def companies(rows: int) -> list[list[int]]:
    """Choices of rows: each alone somewhere, runs of every size around tiles, some in disorder."""
    source = random.Random(SEED)
    sizes = [n for n in (1, 2, 7, 16, 17, 32, 33, 64, 65, 128, 129, 256) if n < rows]
    runs = [(first := source.randrange(rows - n + 1), list(range(first, first + n)))[1] for n in sizes]
    made = [[0], [rows - 1], *runs, source.sample(range(rows), rows), source.sample(range(rows), min(rows, 40))]
    return made if ON_GPU else made[::3]  # the interpreter is slow


def check(run: Run, rows: int, compare: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> None:
    whole = [x.clone() for x in run(list(range(rows)))]
    for picked in companies(rows):
        for found, expected in zip(run(picked), whole, strict=True):
            if compare is not None:
                compare(found, expected[picked])
            else:
                assert torch.equal(found.cpu().nan_to_num(7e7), expected[picked].cpu().nan_to_num(7e7)), (
                    f"seed {SEED}: rows {picked[:4]}... of {len(picked)} differ from the same among {rows}"
                )


SHAPES = [(2560, 4096), (6144, 2560), (2560, 9728), (1000, 777), (19456, 2560)] if ON_GPU else [(200, 320), (70, 2100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_linear(out: int, inner: int, dtype: str) -> None:
    if dtype == "float32" and out * inner > 20e6:
        pytest.skip("the same kernel as for the smaller weights")
    wanted = LinearRequest(
        in_features=inner, out_features=out, dtype=dtype, out_dtype=dtype, weight_dtype=dtype, bias=True, demands=CAP
    )
    op = operator(wanted)
    packed = op.prepare([normal(out, inner, dtype=dtype, seed=1) / inner**0.5], normal(out, dtype=dtype, seed=2))
    rows = ROWS if ON_GPU else 70
    x = normal(rows, inner, dtype=dtype)
    check(lambda picked: [op.run(x[picked], packed)], rows, same_bits)
    if ON_GPU:
        long = normal(4096, inner, dtype=dtype)
        long[1000 : 1000 + rows] = x
        same_bits(op.run(long, packed)[1000 : 1000 + rows], op.run(x, packed))
        for row in range(0, rows, 16):
            same_bits(op.run(x[row : row + 1], packed), op.run(x, packed)[row : row + 1])


@pytest.mark.skipif(not ON_GPU, reason="there is no cuBLAS here")
def test_the_library_is_used_only_where_it_sums_in_the_same_order() -> None:
    wanted = LinearRequest(
        in_features=2560, out_features=6144, dtype="bfloat16", out_dtype="bfloat16", weight_dtype="bfloat16",
        demands=CAP,
    )  # fmt: skip
    op = fixed_linear.FixedOrderLinear(wanted, context(max_tokens=2048))
    packed = op.prepare([normal(6144, 2560, dtype="bfloat16", seed=1)])
    assert op._steady, "cuBLAS does not split K for all of these"
    x = normal(2048, 2560, dtype="bfloat16")
    expected = torch.empty((2048, 6144), dtype=x.dtype, device=DEVICE)
    op._own(x, packed, expected)
    for rows in sorted(op._steady):
        assert torch.equal(op.run(x[:rows], packed), expected[:rows])
    zeros = fixed_linear.FixedOrderLinear(wanted, context())
    zeros.prepare([torch.zeros_like(packed.weight)])
    assert zeros._steady == frozenset(), "a weight of zeros says nothing about the order"


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"] or DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(9728, 2560), (500, 777)] if ON_GPU else [(100, 320)])
def test_gated_linear(width: int, inner: int, dtype: str, limit: float | None) -> None:
    """In one kernel as in two, and both as the activation of the product by an operator of its own."""
    wanted = GatedLinearRequest(
        in_features=inner, width=width, dtype=dtype, weight_dtype=dtype, limit=limit, bias=True, demands=CAP
    )
    op = FixedOrderGatedLinear(wanted, context())  # the provider takes no float32, which the interpreter must have
    packed = op.prepare([normal(2 * width, inner, dtype=dtype, seed=1) / inner**0.5], normal(2 * width, dtype=dtype))
    rows = ROWS if ON_GPU else 70
    x = normal(rows, inner, dtype=dtype)
    check(lambda picked: [op.run(x[picked], packed)], rows, same_bits)
    product = operator(attrs.evolve(wanted.linear, demands=CAP), "fixed_order_linear")
    parts = operator(attrs.evolve(wanted.swiglu, demands=CAP)).run(
        product.run(x, product.prepare([packed.weight], packed.bias))
    )
    for count in (1, 16, 33, 64, rows):
        same_bits(op.run(x[:count], packed), parts[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: str) -> None:
    op = operator(RmsNormRequest(hidden=96, eps=1e-6, dtype=dtype, demands=CAP))
    x, residual, weight = normal(ROWS, 96, dtype=dtype), normal(ROWS, 96, dtype=dtype, seed=1), normal(96, dtype=dtype)
    check(lambda picked: [op.run(x[picked], weight), *op.add(x[picked], residual[picked], weight)], ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(dtype: str) -> None:
    wanted = RopeRequest(head_dim=32, rotary_dim=32, theta=1e4, dtype=dtype, max_positions=300, demands=CAP)
    op, x, positions = operator(wanted), normal(ROWS, 3, 32, dtype=dtype), here(torch.arange(ROWS) % 300)
    check(lambda picked: [op.run(x[picked], op.plan(positions[picked]))], ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: str) -> None:
    op, x = operator(SwigluRequest(width=48, dtype=dtype, demands=CAP)), normal(ROWS, 96, dtype=dtype)
    check(lambda picked: [op.run(x[picked])], ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: str) -> None:
    wanted = EmbeddingRequest(vocab_size=50, hidden=40, dtype=dtype, weight_dtype=dtype, demands=CAP)
    op, table = operator(wanted), normal(50, 40, dtype=dtype)
    ids = here(torch.randint(50, (ROWS,), generator=torch.Generator().manual_seed(SEED)))
    check(lambda picked: [op.run(ids[picked], table)], ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv(dtype: str) -> None:
    shape = {"kv_heads": 2, "head_dim": 16, "dtype": dtype, "cache_dtype": dtype, "block_size": 16}
    op = operator(WriteKVRequest(cache_group="full", demands=CAP | {"kv_layout:paged"}, **shape))
    where, blocks = layout([1] * ROWS, [1] * ROWS, 16)
    key, value = normal(ROWS, 2, 16, dtype=dtype), normal(ROWS, 2, 16, dtype=dtype, seed=1)

    def run(picked: Sequence[int]) -> Sequence[torch.Tensor]:
        cache = {n: torch.zeros((blocks, 16, 2, 16), dtype=key.dtype, device=DEVICE) for n in ("key", "value")}
        chosen = attrs.evolve(here(where), slot_mapping=here(where.slot_mapping)[picked])
        op.run(key[picked], value[picked], cache, chosen)
        flat = here(where.slot_mapping)[picked]
        return [cache[n].view(-1, 2, 16)[flat] for n in ("key", "value")]

    check(run, ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_inputs(dtype: str) -> None:
    wanted = attrs.evolve(inputs_request(4, 2, 32, dtype, block_size=16), demands=CAP | {"kv_layout:paged"})
    op = operator(wanted)
    where, blocks = layout([1] * ROWS, [1 + row % 9 for row in range(ROWS)], 16)
    where = here(where)
    qkv, weights = normal(ROWS, 8 * 32, dtype=dtype), [normal(32, dtype=dtype, seed=n) for n in (1, 2)]

    def run(picked: Sequence[int]) -> Sequence[torch.Tensor]:
        cache = {n: torch.zeros((blocks, 16, 2, 32), dtype=qkv.dtype, device=DEVICE) for n in ("key", "value")}
        slots = where.slot_mapping[picked]
        chosen = attrs.evolve(where, slot_mapping=slots, positions=where.positions[picked])
        query = op.run(qkv[picked], cache, op.plan(chosen), *weights)
        return [query, *(cache[n].view(-1, 2, 32)[slots] for n in ("key", "value"))]

    check(run, ROWS)


STAGES: dict[str, list[dict[str, Any]]] = {
    "mask": [{"allowed": [1, 5, 200]}, {"stop_ids": [3], "min_end": 9}, {}],
    "bias": [{"bias": {3: 1.5}}, {}],
    "penalties": [{"prompt": [1, 2], "output": [2, 2], "frequency": 0.3, "repetition": 1.2}, {}],
    "temperature": [{"temperature": t} for t in (0.7, 1.0, 0.0)],
    "min_p": [{"min_p": p} for p in (0.1, 0.0)],
    "top_k": [{"top_k": k} for k in (5, 0, 100)],
    "top_p": [{"top_p": p} for p in (0.5, 0.9, 1.0)],
    "draw": [{"temperature": t, "seed": s} for t, s in ((1.0, 1), (0.0, 2), (0.7, 3))],
}


@pytest.mark.parametrize("stage", STAGES)
def test_sampling(stage: str) -> None:
    rows, vocab = (40, 700) if ON_GPU else (10, 300)
    op, logits = operator(SamplingRequest(stage=stage, vocab_size=vocab, demands=CAP)), normal(rows, vocab) * 3
    requests = [STAGES[stage][row % len(STAGES[stage])] for row in range(rows)]

    def run(picked: Sequence[int]) -> Sequence[torch.Tensor]:
        return [op.run(logits[picked].clone(), here(batch([requests[row] for row in picked], vocab)))]

    check(run, rows)


def test_logprobs() -> None:
    op, logits = operator(SamplingRequest(stage="logprobs", vocab_size=700, demands=CAP)), normal(40, 700) * 3
    ids = here(torch.arange(40))

    def run(picked: Sequence[int]) -> Sequence[torch.Tensor]:
        found = op.run(logits[picked], ids[picked], 3)
        return [found.chosen, found.rank, found.top_ids, found.top]

    check(run, 40)


def test_runner() -> None:
    draw = torch.Generator().manual_seed(SEED)
    history = here(torch.randint(99, (ROWS, 30), dtype=torch.int32, generator=draw))
    slots, positions = here(torch.randperm(ROWS, generator=draw)), here(torch.randint(30, (ROWS,), generator=draw))
    ids, mapping, append = (
        operator(attrs.evolve(wanted, demands=CAP))
        for wanted in (InputIdsRequest(), SlotMappingRequest(block_size=16), AppendTokensRequest())
    )

    def run(picked: Sequence[int]) -> Sequence[torch.Tensor]:
        written = history.clone()
        append.run(written, slots[picked], positions[picked], positions[picked])
        table = history[:, :2].contiguous()
        return [
            ids.run(history, slots[picked], positions[picked]),
            mapping.run(table, slots[picked], positions[picked]),
            written[slots[picked]],
        ]

    check(run, ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_paged_attention(window: int | None, dtype: str) -> None:
    """Rows of many requests: each request alone, in any company, its last row as a decode row and in a prompt."""
    wanted = attention_request(dtype, window=window, demands=CAP | {"kv_layout:paged"})
    source = random.Random(SEED)
    longest = 2100 if ON_GPU else 90
    contexts = [source.randrange(1, longest) for _ in range(50 if ON_GPU else 5)] + [longest]
    scene = Scene([1] * len(contexts), contexts, dtype=getattr(torch, dtype))
    expected = attend(scene, wanted)
    for picked in companies(len(contexts))[-6:]:
        some = attrs.evolve(
            scene.layout,
            positions=scene.layout.positions[picked],
            block_table=scene.layout.block_table[picked],
            seq_lens=scene.layout.seq_lens[picked],
            host_query_lens=scene.layout.host_query_lens[picked],
            host_seq_lens=scene.layout.host_seq_lens[picked],
            max_seq_len=int(scene.layout.host_seq_lens[picked].max()),
        )
        op = operator(wanted)
        found = op.run(here(scene.query[picked].clone()), here(scene.cache), op.plan(here(some)))
        same_bits(found.cpu().double(), expected[picked])
    prompt = Scene([longest], [longest], dtype=getattr(torch, dtype))
    whole = attend(prompt, wanted)
    for count in (1, 2, 5, 17, 40, longest // 2):
        chunk = Scene([count], [longest], dtype=getattr(torch, dtype))
        chunk.query = prompt.query[-count:]
        same_bits(attend(chunk, wanted), whole[-count:])


def test_every_claim_names_a_test() -> None:
    from pathlib import Path

    root = Path(__file__).parents[2]
    claims = [p for p in providers() if "batch_invariant" in p.caps]
    assert claims
    for provider in claims:
        file, _, name = provider.proofs["batch_invariant"].partition("::")
        assert f"def {name}(" in (root / file).read_text(encoding="utf-8"), provider.name
