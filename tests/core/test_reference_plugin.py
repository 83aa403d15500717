"""What the reference plugin declares."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from reference_support import DEVICE, candidates, operator, providers

from deepinfer_core.api import (
    STAGES,
    ConfigError,
    LazyRef,
    RopeRequest,
    SamplingRequest,
    SlotMappingRequest,
    SwigluRequest,
)
from deepinfer_core.reference import plugin
from deepinfer_core.reference.dtypes import dtype_named
from deepinfer_core.reference.rope import frequencies

FIELDS = {
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def rope_request(kind: str) -> RopeRequest:
    return RopeRequest(
        head_dim=8, rotary_dim=8, theta=1e4, dtype="float32", max_positions=16, scaling={"rope_type": kind, **FIELDS}
    )


def test_declaring_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from deepinfer_core.reference import plugin\n"
        "plugin.deepinfer_plugin()\n"
        "assert plugin.deepinfer_sampling(None) and plugin.deepinfer_attention(None)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plugin_is_called_reference() -> None:
    assert plugin.deepinfer_plugin().name == "reference"


def test_provider_names_are_unique() -> None:
    names = [provider.name for provider in providers()]
    assert len(names) == len(set(names))


def test_every_provider_is_a_fallback_whose_target_exists() -> None:
    for provider in providers():
        assert provider.fallback
        assert isinstance(provider.build, LazyRef)
        assert callable(provider.build.load())


def test_only_what_moves_data_claims_batch_invariance_and_nothing_capture() -> None:
    for provider in providers():
        assert ("batch_invariant" in provider.caps) == (provider.name in plugin.MOVES_DATA)
        assert "graph_capture" not in provider.caps


def test_a_demand_it_does_not_know_leaves_no_candidate() -> None:
    assert candidates(SwigluRequest(width=4, dtype="float32", demands=frozenset({"batch_invariant"}))) == []


def test_attention_answers_to_the_name_of_the_layout() -> None:
    (layout,) = plugin.deepinfer_kv_layout(DEVICE)
    assert all(f"kv_layout:{layout.name}" in provider.caps for provider in plugin.deepinfer_attention(DEVICE))


@pytest.mark.parametrize("name", [*STAGES, "logprobs"])
def test_each_stage_has_its_own_provider(name: str) -> None:
    demands = frozenset({"spec_verify", "device_state"})
    found = candidates(SamplingRequest(stage=name, vocab_size=8, demands=demands))
    assert [provider.name for provider in found] == [name]


def test_a_stage_refuses_another_stage_with_a_reason() -> None:
    top_k = next(p for p in plugin.deepinfer_sampling(DEVICE) if p.name == "top_k")
    verdict = top_k.supports(SamplingRequest(stage="top_p", vocab_size=8))
    assert verdict.score is None
    assert "'top_k'" in verdict.reason
    assert "'top_p'" in verdict.reason


@pytest.mark.parametrize("kind", plugin.ROPE_TYPES)
def test_declared_rope_types_are_the_defined_ones(kind: str) -> None:
    assert candidates(rope_request(kind))
    assert frequencies(rope_request(kind), torch.device("cpu"))[0].shape == (4,)


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    rope = next(p for p in plugin.deepinfer_pointwise(DEVICE) if p.name == "rope")
    assert "longrope" in rope.supports(rope_request("longrope")).reason
    with pytest.raises(ConfigError, match="longrope"):
        frequencies(rope_request("longrope"), torch.device("cpu"))


def test_operators_are_built_through_lazy_references() -> None:
    assert operator(SlotMappingRequest(block_size=4)).run(
        torch.tensor([[3]], dtype=torch.int32), torch.tensor([0]), torch.tensor([2])
    ).tolist() == [14]


def test_a_name_that_is_no_dtype_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="gguf"):
        dtype_named("gguf:q8_0")
