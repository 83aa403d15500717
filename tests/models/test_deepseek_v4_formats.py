"""Checkpoints as released: FP8 blocks, FP4 experts, shards, names, and the roundings that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from v4.released import DIMENSIONS, pack_all, released_config, released_tensors, unpack_all, write
from v4.support import Stepper, assert_same, chunk_ends, oracle, plan_of, random_model, random_tokens

from deepinfer_core.api import CheckpointError, ConfigError, QdqFormat, QuantiseDequantiseRequest, QuantisedWeight
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.engine.planning import describe_model, open_registry
from deepinfer_core.models.deepseek_v4.config import V4Config
from deepinfer_core.reference.fp_formats import dequantise
from deepinfer_core.reference.grouped import GroupedLinear

SEED, LENGTH = 5, 45
TOKENS = random_tokens(9, LENGTH)
OFF: dict[str, Any] = {"model.qdq": "off"}
ON: dict[str, Any] = {"model.qdq": "on"}
BFLOAT16: dict[str, Any] = {"model.dtype": "bfloat16"}
REFERENCE: dict[str, Any] = {"ops": {f"gemm.{kind}": ["reference"] for kind in ("linear", "batched", "grouped")}}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return released_tensors(tmp_path_factory.mktemp("saved"), SEED)


@pytest.fixture(scope="module")
def packed(floats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return pack_all(floats)


@pytest.fixture(scope="module")
def released(packed: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("released"), packed, released_config(), shards=3)


@pytest.fixture(scope="module")
def decoded(packed: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same numbers, stored plainly."""
    config = {k: v for k, v in released_config().items() if k not in ("quantization_config", "expert_dtype")}
    return write(tmp_path_factory.mktemp("decoded"), unpack_all(packed), config)


def logprobs(path: Path, **settings: Any) -> torch.Tensor:
    return Stepper(path, **settings).step([(0, TOKENS, 0)])


def test_packed_weights_load_bit_for_bit(released: Path, decoded: Path) -> None:
    """Every weight an operator holds, decoded, is the number that was stored."""
    left, right = Stepper(released, **OFF, **REFERENCE), Stepper(decoded, **REFERENCE)
    pairs = list(zip(weights(left.model), weights(right.model), strict=True))
    assert len(pairs) > 4 * (8 * 2 + 12)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.allclose(left.step([(0, TOKENS, 0)]), right.step([(0, TOKENS, 0)]), atol=1e-5)


def weights(model: Any) -> Iterator[torch.Tensor]:
    """Every tensor a model's layers and ends hold, packed ones decoded."""
    stack = [model.ends, *model.blocks]
    while stack:
        item = stack.pop()
        if isinstance(item, QuantisedWeight):
            yield dequantise(item)
        elif isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list):
            # Packed parts are compared stacked, as plain ones are kept.
            parts = [dequantise(part) if isinstance(part, QuantisedWeight) else part for part in item]
            stack += [torch.cat(parts)] if parts and isinstance(parts[0], torch.Tensor) else parts
        elif attrs.has(type(item)) and not isinstance(item, V4Config):
            stack += [getattr(item, field.name) for field in attrs.fields(type(item)) if field.name != "ops"]


def test_the_released_layout_agrees_with_transformers_on_the_decoded_weights(
    released: Path, packed: dict[str, torch.Tensor]
) -> None:
    model = random_model(SEED, **DIMENSIONS)
    plain = unpack_all(packed)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            ours = {n.removeprefix(f"layers.{layer}."): t for n, t in plain.items() if n.startswith(f"layers.{layer}.")}
            put(block, ours)
        model.model.embed_tokens.weight.copy_(plain["embed.weight"])
        model.lm_head.weight.copy_(plain["head.weight"])
        model.model.norm.weight.copy_(plain["norm.weight"])
    assert_same(logprobs(released, **OFF), oracle(model, TOKENS), "released layout")


def put(block: Any, ours: dict[str, torch.Tensor]) -> None:
    """Copy one layer's tensors whose values the packing changed."""
    attention = block.self_attn
    for name, module in {
        "wq_a": attention.q_a_proj, "wq_b": attention.q_b_proj, "wkv": attention.kv_proj,
        "wo_a": attention.o_a_proj, "wo_b": attention.o_b_proj, "q_norm": attention.q_a_norm,
        "kv_norm": attention.kv_norm,
    }.items():  # fmt: skip
        module.weight.copy_(ours[f"attn.{name}.weight"])
    for prefix, owner in (("attn.compressor", "compressor"), ("attn.indexer.compressor", "compressor.indexer")):
        if f"{prefix}.ape" in ours:
            module = attention.get_submodule(owner)
            for name, part in (("wkv", "kv_proj"), ("wgate", "gate_proj"), ("norm", "kv_norm")):
                module.get_submodule(part).weight.copy_(ours[f"{prefix}.{name}.weight"])
    if "attn.indexer.wq_b.weight" in ours:
        attention.compressor.indexer.q_b_proj.weight.copy_(ours["attn.indexer.wq_b.weight"])
        attention.compressor.indexer.scorer.weights_proj.weight.copy_(ours["attn.indexer.weights_proj.weight"])
    block.input_layernorm.weight.copy_(ours["attn_norm.weight"])
    block.post_attention_layernorm.weight.copy_(ours["ffn_norm.weight"])
    block.mlp.gate.weight.copy_(ours["ffn.gate.weight"])
    for expert in range(8):
        w1, w2, w3 = (ours[f"ffn.experts.{expert}.{w}.weight"] for w in ("w1", "w2", "w3"))
        block.mlp.experts.gate_up_proj[expert].copy_(torch.cat((w1, w3)))
        block.mlp.experts.down_proj[expert].copy_(w2)
    shared = block.mlp.shared_experts
    for name, module in (("w1", shared.gate_proj), ("w3", shared.up_proj), ("w2", shared.down_proj)):
        module.weight.copy_(ours[f"ffn.shared_experts.{name}.weight"])


def test_experts_stay_packed_and_mapped(released: Path) -> None:
    stepper = Stepper(released)
    experts = stepper.model.blocks[0].experts
    assert isinstance(stepper.ops.expert_gate_up, GroupedLinear)
    assert all(isinstance(part, QuantisedWeight) for parts in experts.gate_up for part in parts)
    assert experts.gate_up[0][0].data.dtype == torch.int8


def test_float32_tensors_stay_float32(released: Path) -> None:
    """Mixing, sinks, router biases and position biases keep what bfloat16 would lose."""
    stepper = Stepper(released, **BFLOAT16)
    block = stepper.model.blocks[3]
    kept = [block.attention.sinks, block.experts.bias, block.attention.compressor.position_bias]
    kept += [block.attention_mixing.fn, block.attention_mixing.base, stepper.model.ends.hyper_head.scale]
    assert all(tensor.dtype == torch.float32 for tensor in kept)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in kept)


def test_the_caches_of_pooling_stay_float32_in_16_bit_models(released: Path) -> None:
    stepper = Stepper(released, **BFLOAT16)
    dtypes = {g: {t.dtype for layer in c for t in layer.values()} for g, c in stepper.caches.items()}
    assert dtypes["csa_tail"] == dtypes["hca_tail"] == dtypes["index_tail"] == {torch.float32}
    assert dtypes["window"] == dtypes["csa"] == {torch.bfloat16}


def rounding(format: QdqFormat, width: int, channels: int, group: int, hadamard: bool) -> Any:
    from deepinfer_core.reference.quantise import QuantiseDequantise

    request = QuantiseDequantiseRequest(
        format=format,
        width=width,
        channels=channels,
        group=group,
        dtype="float32",
        hadamard=hadamard,
    )
    context: Any = type("Context", (), {"device": torch.device("cpu")})
    return QuantiseDequantise(request, context)


def test_roundings_sit_where_the_trained_arithmetic_has_them(
    floats: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has no roundings: they are put after its rotation of cached vectors, index keys and queries."""
    config = {k: v for k, v in released_config().items() if k not in ("quantization_config", "expert_dtype")}
    path = write(tmp_path / "plain", floats, config)
    model = random_model(SEED, **DIMENSIONS)
    off = oracle(model, TOKENS)
    rotate = modeling_deepseek_v4.apply_rotary_pos_emb
    cached, index = rounding("fp8:e4m3", 80, 64, 64, False), rounding("fp4:e2m1", 32, 32, 32, True)

    def rotate_and_round(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **more: Any) -> torch.Tensor:
        rotated: torch.Tensor = rotate(x, cos, sin, **more)
        if rotated.shape[-1] == 32:
            rotated = index.run(rotated)
        elif rotated.shape[1] == 1:
            rotated = cached.run(rotated)
        return rotated

    monkeypatch.setattr(modeling_deepseek_v4, "apply_rotary_pos_emb", rotate_and_round)
    on = oracle(model, TOKENS)
    found = Stepper(path, **ON).run(TOKENS, chunk_ends(LENGTH, 7))
    # A value on a rounding boundary may fall to either side; a rounding left out moves nearly every row.
    near = ((found - on.logprobs).abs().amax(-1) < 1e-4).float().mean()
    assert near > 0.8
    assert ((on.logprobs - off.logprobs).abs().amax(-1) > 1e-3).float().mean() > 0.8


def test_roundings_follow_the_checkpoint_unless_told(released: Path, decoded: Path) -> None:
    def slots(path: Path, **settings: Any) -> set[str]:
        return {name for name in plan_of(path, **settings).spec.ops if name.startswith("qdq")}

    assert slots(released) == {"qdq_kv", "qdq_index"}
    assert slots(decoded) == set()
    assert slots(released, **OFF) == set()
    assert slots(decoded, **ON) == {"qdq_kv", "qdq_index"}


def test_geometry_that_cannot_be_rounded_is_one_error(tmp_path: Path) -> None:
    random_model(1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"set model\.qdq='off'"):
        plan_of(tmp_path, **ON)


def test_a_missing_scale_is_named(packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    without = {n: t for n, t in packed.items() if n != "layers.1.attn.wq_a.scale"}
    path = write(tmp_path, without, released_config())
    with pytest.raises(CheckpointError, match=r"'layers\.1\.attn\.wq_a\.weight' is float8_e4m3fn but .*wq_a\.scale"):
        plan_of(path)


def test_scales_of_another_type_are_refused(packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "layers.1.attn.wq_a.scale"
    path = write(tmp_path, packed | {name: packed[name].float()}, released_config())
    with pytest.raises(CheckpointError, match=r"wq_a\.scale' is float32: expected float8_e8m0fnu"):
        plan_of(path)


def test_weights_of_one_kind_in_two_formats_are_refused(packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "layers.2.attn.wo_b.weight"
    mixed = {n: t for n, t in packed.items() if n != "layers.2.attn.wo_b.scale"}
    path = write(tmp_path, mixed | {name: torch.zeros(160, 64)}, released_config())
    with pytest.raises(CheckpointError, match="weights of one kind are stored in different formats"):
        plan_of(path)


def test_a_damaged_shape_is_named_before_loading(packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    from deepinfer_core import LLM

    name = "layers.0.ffn.experts.3.w2.scale"
    path = write(tmp_path, packed | {name: packed[name][:, :1].contiguous()}, released_config())
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts\.3\.w2\.scale'.*expected \[160, 2\]"):
        LLM(path, kv_cache={"block_size": 16}, logging={"progress": False})


def test_memory_is_described_without_loading(released: Path) -> None:
    from deepinfer_core.cli.memory import cache_needs
    from deepinfer_core.config import load_config
    from deepinfer_core.plugins import choose_device

    config = load_config(overrides={"model.path": str(released), "kv_cache.block_size": 16})
    registry = open_registry(config, {})
    chosen = choose_device(registry, "cpu", {})
    with open_checkpoint(released) as checkpoint:
        device = chosen.device.provider.load()(chosen.device)
        spec = describe_model(config, checkpoint, registry, device)[1]
    needs = {need.group: need.bytes_per_token for need in cache_needs(spec, block_size=16, context=64, batch=1)}
    assert needs["window"] == 4 * 80 * 4
    assert needs["csa"] == 2 * 80 * 4 / 4
    assert needs["hca"] == 80 * 4 / 16
    assert needs["index_tail"] == 2 * 2 * 64 * 4
