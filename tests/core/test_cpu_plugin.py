"""What the host's plugin declares, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import attrs
import pytest
from cpu_support import HOOKS, HOST, providers, verdicts

from deepinfer_core.api import (
    CacheEntry,
    CacheGroupSpec,
    KVLayoutRequest,
    LazyRef,
    LinearRequest,
    OpRequest,
    PagedAttentionRequest,
    RmsNormRequest,
    SamplingRequest,
    WriteKVRequest,
)

HEADS: dict[str, Any] = {"cache_group": "full", "kv_heads": 2, "head_dim": 8, "block_size": 4}
FLOAT32: dict[str, Any] = {"dtype": "float32", "cache_dtype": "float32"}


def linear(**changes: Any) -> LinearRequest:
    fields: dict[str, Any] = {
        "in_features": 8,
        "out_features": 4,
        "dtype": "float32",
        "out_dtype": "float32",
        "weight_dtype": "bfloat16",
    }
    return LinearRequest(**(fields | changes))


def paged(**changes: Any) -> PagedAttentionRequest:
    return PagedAttentionRequest(**({"q_heads": 4, "scale": 1.0, **HEADS, **FLOAT32} | changes))


def reasons(request: OpRequest) -> str:
    """Why nobody takes the request."""
    found = verdicts(request)
    assert found
    assert not any(found.values())
    return "; ".join(verdict.reason for verdict in found.values())


def test_declaring_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from deepinfer_core.api import ProbeEnv\n"
        "from deepinfer_core.cpu import plugin as p\n"
        "(device,) = p.deepinfer_probe(ProbeEnv(environ={}))\n"
        "hooks = (p.deepinfer_attention, p.deepinfer_gemm, p.deepinfer_pointwise, p.deepinfer_sampling)\n"
        "assert all(hook(device) for hook in hooks)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_backends_device_is_left_alone() -> None:
    assert not [provider for hook in HOOKS for provider in hook(attrs.evolve(HOST, backend="other"))]


def test_names_are_unique_for_each_operator() -> None:
    names = [(provider.op, provider.name) for provider in providers()]
    assert len(names) == len(set(names))


def test_every_provider_has_a_target_and_is_no_fallback() -> None:
    for provider in providers():
        assert isinstance(provider.build, LazyRef)
        assert callable(provider.build.load())
        assert not provider.fallback


def test_any_stored_weight_is_served() -> None:
    assert any(verdicts(linear(weight_dtype="gguf:q4_1")).values())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (linear(dtype="bfloat16"), "float32; dtype is bfloat16"),
        (linear(out_dtype="float64"), "float32; out_dtype is float64"),
        (linear(device_type="meta"), "runs on cpu, not meta"),
        (paged(softcap=30.0), "no soft cap"),
        (paged(sinks=True), "no sinks"),
        (paged(dtype="float64"), "dtype is float64"),
        (paged(cache_dtype="bfloat16"), "cache_dtype is bfloat16"),
        (WriteKVRequest(**(HEADS | FLOAT32 | {"cache_dtype": "bfloat16"})), "cache_dtype is bfloat16"),
        (RmsNormRequest(hidden=8, eps=1e-6, dtype="bfloat16"), "dtype is bfloat16"),
        (SamplingRequest(stage="bias", vocab_size=8), "serves stage"),
    ],
)
def test_a_refusal_says_why(request_: OpRequest, reason: str) -> None:
    assert reason in reasons(request_)


def test_each_layout_has_operators_that_read_it_and_write_it() -> None:
    write = WriteKVRequest(**(HEADS | FLOAT32))
    for layout in ("paged", "transposed_keys"):
        demands = frozenset({f"kv_layout:{layout}"})
        for request in (
            paged(demands=demands),
            paged(demands=demands, causal=False),
            attrs.evolve(write, demands=demands),
        ):
            assert [bool(verdict) for verdict in verdicts(request).values()] == [True]


KEY, VALUE = CacheEntry("key", (2, 16), "float32"), CacheEntry("value", (2, 16), "float32")


def kv_layout(*entries: CacheEntry, block_size: int = 64, **changes: Any) -> KVLayoutRequest:
    group = CacheGroupSpec(**({"name": "full", "layers": 1, "entries": entries or (KEY, VALUE)} | changes))
    return KVLayoutRequest(group=group, block_size=block_size)


def test_keys_are_transposed_in_long_blocks() -> None:
    assert (verdicts(kv_layout())["transposed_keys"].score or 0) > (verdicts(kv_layout())["paged"].score or 0)
    assert verdicts(kv_layout(block_size=32))["transposed_keys"]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (kv_layout(block_size=16), "from blocks of 32 tokens on.*block_size is 16"),
        (kv_layout(block_size=40), "in steps of 16; block_size is 40"),
        (kv_layout(CacheEntry("kv", (16,), "float32")), "a key and a value of one shape, not kv"),
        (kv_layout(KEY, CacheEntry("value", (2, 8), "float32")), "of one shape"),
        (kv_layout(KEY, CacheEntry("value", (2, 16), "bfloat16")), "holds float32"),
        (kv_layout(tokens_per_row=4), "a row for every token"),
    ],
)
def test_what_does_not_fit_transposed_keys(request_: KVLayoutRequest, reason: str) -> None:
    verdict = verdicts(request_)["transposed_keys"]
    assert not verdict
    assert re.search(reason, verdict.reason)


def test_another_layout_is_refused_by_its_demand() -> None:
    assert verdicts(paged(demands=frozenset({"kv_layout:paged"})))
    assert not verdicts(paged(demands=frozenset({"kv_layout:other"})))


def test_no_operator_promises_what_it_does_not_keep() -> None:
    """Where prompt chunks and single rows take different kernels, results depend on how a step was cut.

    What declares it is held to it by tests/batch_invariance/test_core_providers.py.
    """
    declared = {provider.name for provider in providers() if "batch_invariant" in provider.caps}
    moves_data = {"write_kv", "write_kv_transposed", "input_ids", "slot_mapping", "append_tokens"}
    assert declared == moves_data | {"mask", "top_k", "top_p", "draw", "logprobs"}
