"""Every adapter over emulated NPU operators gives what the core's reference gives in float64."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch
from deepinfer_ascend950.capabilities import NATIVE, providers
from toys.seeds import module_seed

from ascend950.emulation import install, schemas
from deepinfer_core.api import (
    BatchedLinearRequest,
    BuildContext,
    GroupedLinearRequest,
    HyperConnectionRequest,
    LinearRequest,
    MoeExchangeRequest,
    OpRequest,
    PagedAttentionRequest,
    RmsNormRequest,
    RopeRequest,
    StepLayout,
    SwigluRequest,
    WriteKVRequest,
)
from deepinfer_core.reference import plugin as reference

SEED = module_seed(__name__)
EPS = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-19}
"""Spacing of the dtype at 1; of float32 a sum of 32 products, each off by 2^-24. The oracle rounds nothing."""
DTYPES = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def _operators() -> None:
    install()
    torch.manual_seed(SEED)


def _reference(request: OpRequest) -> Any:
    from ascend950.emulated_backend import deepinfer_probe
    from deepinfer_core.api import ProbeEnv

    (device,) = deepinfer_probe(ProbeEnv(environ={}))
    hooks = [value for name, value in vars(reference).items() if name.startswith("deepinfer_")]
    for hook in hooks:
        if "device" not in hook.__code__.co_varnames[: hook.__code__.co_argcount]:
            continue
        for provider in hook(device):
            if provider.op == request.op and provider.supports(request):
                build = provider.build.load() if hasattr(provider.build, "load") else provider.build
                return build(request, context())
    raise LookupError(request.op)


def context() -> BuildContext:
    return BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=8,
        max_model_len=1024,
        num_threads=1,
        settings=None,
        reference=_reference,
    )


def adapter(request: OpRequest) -> Any:
    """The backend's own operator for a request it must take."""
    (provider,) = [p for p in providers() if p.op == request.op and not p.name.startswith("triton_")]
    verdict = provider.supports(request)
    assert verdict, verdict.reason
    return provider.build.load()(request, context())


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """``expected`` float64; within one rounding of the dtype found, relative to each row's largest magnitude."""
    assert found.shape == expected.shape
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = ((found.double() - expected) / scale).abs().max().item() if found.numel() else 0.0
    assert error <= EPS[found.dtype], f"relative error {error:.2e} in {found.dtype} (seed {SEED})"


def test_the_emulation_has_every_operator_that_the_table_names() -> None:
    named = {name for native in NATIVE.values() for name in native.operator.replace(",", " ").split()}
    assert {name for name in named if name.startswith("npu_")} == set(schemas())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (7, 3, 48)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm(dtype: str, shape: tuple[int, ...], weight_dtype: torch.dtype | None) -> None:
    norm = adapter(RmsNormRequest(hidden=48, eps=1e-3, dtype=dtype))
    x = torch.randn(shape).to(getattr(torch, dtype))
    weight = torch.randn(48).to(weight_dtype or x.dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    close(norm.run(x, weight), expected)


def test_rms_norm_of_a_sum_returns_the_sum_too() -> None:
    norm = adapter(RmsNormRequest(hidden=16, eps=1e-3, dtype="float32"))
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total = x.double() + residual.double()
    kept = x.clone()
    normed, summed = norm.add(x, residual, weight)
    close(summed, total)
    close(normed, total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double())
    assert torch.equal(x, kept)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "trailing"), [(32, 32, False), (32, 8, False), (32, 8, True)])
@pytest.mark.parametrize("scaling", [{}, LLAMA3], ids=["plain", "llama3"])
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(
    dtype: str, interleaved: bool, head_dim: int, rotary_dim: int, trailing: bool, scaling: Any, inverse: bool
) -> None:
    request = RopeRequest(
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=1e4,
        dtype=dtype,
        max_positions=1024,
        interleaved=interleaved,
        trailing=trailing,
        scaling=scaling,
    )
    positions = torch.tensor([0, 1, 5, 700])
    x = torch.randn(4, 3, head_dim).to(getattr(torch, dtype))
    rope = adapter(request)
    oracle = _reference(attrs.evolve(request, dtype="float32"))
    expected = oracle.run(x.float(), oracle.plan(positions), inverse=inverse)
    found = rope.run(x, rope.plan(positions), inverse=inverse)
    assert found.dtype == x.dtype
    assert (found.double() - expected.double()).abs().max() <= 4 * EPS[x.dtype] * expected.abs().max()
    assert rope.run(x[:0], rope.plan(positions[:0])).shape == (0, 3, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_swiglu(dtype: str, limit: float | None, rows: int) -> None:
    x = torch.randn(rows, 24).to(getattr(torch, dtype)) * 3
    gate, up = x.double().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = gate / (1 + (-gate).exp()) * up
    close(adapter(SwigluRequest(width=12, dtype=dtype, limit=limit)).run(x), expected)


def step(lengths: list[tuple[int, int]], block_size: int = 128) -> StepLayout:
    """Requests of (rows in the step, context after it), blocks scattered over the pool."""
    queries, contexts = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    blocks = [-(-int(context) // block_size) for context in contexts]
    free = (torch.randperm(sum(blocks)) + 1).tolist()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    positions, slots = [], []
    for request, (rows, length) in enumerate(lengths):
        own = [free.pop() for _ in range(blocks[request])]
        table[request, : len(own)] = torch.tensor(own)
        for position in range(length - rows, length):
            positions.append(position)
            slots.append(own[position // block_size] * block_size + position % block_size)
    return StepLayout(
        block_size=block_size,
        cu_seqlens=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
        seq_lens=torch.from_numpy(contexts),
        positions=torch.tensor(positions, dtype=torch.int64),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        host_query_lens=queries,
        host_seq_lens=contexts,
        max_query_len=int(queries.max()),
        max_seq_len=int(contexts.max()),
    )


def paged(dtype: str = "bfloat16", **changes: Any) -> PagedAttentionRequest:
    fields: dict[str, Any] = {
        "cache_group": "full",
        "q_heads": 4,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": dtype,
        "cache_dtype": dtype,
        "scale": 0.1,
        "block_size": 128,
    }
    return PagedAttentionRequest(**{**fields, **changes})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "lengths", [[(1, 1)], [(1, 129), (1, 128), (1, 5)], [(1, 300), (0, 7), (3, 3), (130, 200)], [(4, 260)]]
)
def test_paged_attention_and_its_cache_writes(dtype: str, lengths: list[tuple[int, int]]) -> None:
    request = paged(dtype)
    layout = step(lengths)
    rows = len(layout.positions)
    shape = (int(layout.block_table.max()) + 2, 128, 2, 128)
    cache = {name: torch.randn(shape).to(getattr(torch, dtype)) for name in ("key", "value")}
    before = {name: tensor.clone() for name, tensor in cache.items()}
    key, value, query = (torch.randn(rows, heads, 128).to(getattr(torch, dtype)) for heads in (2, 2, 4))
    write = adapter(
        WriteKVRequest(cache_group="full", kv_heads=2, head_dim=128, dtype=dtype, cache_dtype=dtype, block_size=128)
    )
    write.run(key, value, cache, layout)
    for name, new in (("key", key), ("value", value)):
        flat, old = cache[name].flatten(0, 1), before[name].flatten(0, 1)
        assert torch.equal(flat[layout.slot_mapping], new)
        old[layout.slot_mapping] = new
        assert torch.equal(flat, old)  # nothing else was written

    oracle = _reference(request)
    wide = {name: tensor.double() for name, tensor in cache.items()}
    expected = oracle.run(query.double(), wide, oracle.plan(layout))
    attention = adapter(request)
    close(attention.run(query, cache, attention.plan(layout)), expected)


def test_paged_attention_without_rows() -> None:
    attention = adapter(paged())
    layout = step([(0, 7)])
    cache = {name: torch.zeros(3, 128, 2, 128, dtype=torch.bfloat16) for name in ("key", "value")}
    query = torch.empty(0, 4, 128, dtype=torch.bfloat16)
    assert attention.run(query, cache, attention.plan(layout)).shape == (0, 4, 128)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 64}, "band"),
        ({"sinks": True}, "sinks are float32"),
        ({"softcap": 30.0}, "soft cap"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"block_size": 16}, "set kv_cache.block_size=128"),
        ({"block_size": 640}, "up to 512"),
        ({"q_heads": 256}, "share a key head"),
        ({"kv_heads": 512, "q_heads": 512}, "65536"),
        ({"cache_dtype": "float16"}, "one for both"),
        ({"dtype": "float32", "cache_dtype": "float32"}, "takes float16, bfloat16"),
    ],
)
def test_attention_refuses_what_the_document_excludes_or_leaves_open(changes: dict[str, Any], reason: str) -> None:
    (provider,) = [p for p in providers() if p.op == "attention.paged"]
    verdict = provider.supports(paged(**changes))
    assert not verdict
    assert reason in verdict.reason


def matrices(request: Any) -> list[torch.Tensor]:
    return [torch.randn(request.out_features, request.in_features) for _ in range(request.groups)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: str, rows: int, bias: bool) -> None:
    linear = adapter(
        LinearRequest(in_features=32, out_features=20, dtype=dtype, out_dtype=dtype, weight_dtype="float32", bias=bias)
    )
    parts = [torch.randn(12, 32), torch.randn(8, 32)]
    offset = torch.randn(20) if bias else None
    typed = getattr(torch, dtype)
    x = torch.randn(rows, 32).to(typed)
    expected = x.double() @ torch.cat(parts).to(typed).double().T
    if offset is not None:
        expected = expected + offset.to(typed).double()
    close(linear.run(x, linear.prepare(parts, offset)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_batched_linear(dtype: str, rows: int) -> None:
    request = BatchedLinearRequest(
        groups=3, in_features=32, out_features=8, dtype=dtype, out_dtype=dtype, weight_dtype="float32"
    )
    linear, typed, weights = adapter(request), getattr(torch, dtype), matrices(request)
    x = torch.randn(rows, 3, 32).to(typed)
    expected = torch.stack([x[:, g].double() @ w.to(typed).double().T for g, w in enumerate(weights)], 1)
    close(linear.run(x, linear.prepare([torch.cat(weights)])), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 3, 0, 4), (2, 1, 3, 1)])
def test_grouped_linear(dtype: str, counts: tuple[int, ...]) -> None:
    request = GroupedLinearRequest(
        groups=4, in_features=32, out_features=8, dtype=dtype, out_dtype=dtype, weight_dtype="float32"
    )
    linear, typed, weights = adapter(request), getattr(torch, dtype), matrices(request)
    x = torch.randn(sum(counts), 32).to(typed)
    offsets = torch.tensor([0, *np.cumsum(counts)])
    parts = x.double().split(counts)
    expected = torch.cat([p @ w.to(typed).double().T for p, w in zip(parts, weights, strict=True)])
    close(linear.run(x, offsets, linear.prepare([[w[:3], w[3:]] for w in weights])), expected)


@pytest.mark.parametrize("kind", ["fp8:e4m3:128x128", "fp4:e2m1:1x32"])
def test_quantised_weights_are_refused_since_activations_would_be_rounded(kind: str) -> None:
    (provider,) = [p for p in providers() if p.op == "gemm.linear"]
    request = LinearRequest(
        in_features=128, out_features=128, dtype="bfloat16", out_dtype="bfloat16", weight_dtype=kind
    )
    assert "round activations" in provider.supports(request).reason


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_exchange_sends_every_row_to_its_expert_and_back(tokens: int) -> None:
    request = MoeExchangeRequest(experts=5, top_k=2, hidden=8, dtype="float32")
    exchange = adapter(request)
    x, weights = torch.randn(tokens, 8), torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(4)[:2].sort().values for _ in range(tokens)]) if tokens else torch.zeros(0, 2)
    ids = ids.to(torch.int64)
    sent = exchange.dispatch(x, ids, weights)
    assert sent.offsets.tolist() == [0, *np.cumsum(np.bincount(ids.flatten().numpy(), minlength=5)).tolist()]
    outputs = torch.empty_like(sent.rows)
    for expert in range(5):
        mine = slice(int(sent.offsets[expert]), int(sent.offsets[expert + 1]))
        outputs[mine] = sent.rows[mine] * (expert + 1) * sent.weights[mine, None]
    expected = sum(x.double() * (ids[:, k, None] + 1) * weights[:, k, None].double() for k in range(2))
    found = exchange.combine(outputs, sent.handle)
    assert found.dtype == torch.float32
    close(found, torch.as_tensor(expected))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_hyper_connection(tokens: int) -> None:
    request = HyperConnectionRequest(streams=4, hidden=16, iterations=3, eps=1e-6, norm_eps=1e-6, dtype="bfloat16")
    ours, oracle = adapter(request), _reference(attrs.evolve(request, dtype="float64"))
    fn, base, scale = torch.randn(24, 64) * 0.2, torch.randn(24), torch.rand(3)
    streams = torch.randn(tokens, 4, 16).bfloat16()
    output = torch.randn(tokens, 16).bfloat16()
    mixed, carry = ours.mix(streams, ours.prepare(fn, base, scale))
    expected, exact = oracle.mix(streams.double(), oracle.prepare(fn, base, scale))
    close(mixed, expected)
    close(ours.merge(streams, output, carry), oracle.merge(streams.double(), output.double(), exact))
