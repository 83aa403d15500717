"""GGUF files: configuration, names, row order, dequantisation, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_support import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    build_model,
    rounded,
    tiny_model,
    weights_of,
    write_directory,
    write_gguf,
)
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import Checkpoint, open_checkpoint
from deepinfer_core.checkpoint.gguf_file import GGUFFile

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return tiny_model("llama")


def opened(path: Path, architecture: str, model: torch.nn.Module, **options: Any) -> Checkpoint:
    return open_checkpoint(write_gguf(path / "model.gguf", architecture, weights_of(model), **options))


def logits_from(checkpoint: Checkpoint, kind: str) -> torch.Tensor:
    """Logits of a transformers model built from nothing but the checkpoint's config and weights."""
    model = build_model(kind, checkpoint.config)
    model.load_state_dict({name: checkpoint.weights.load(name) for name in checkpoint.weights.names()}, strict=True)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(20)[None]).logits
    return result


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_survives_the_round_trip(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind)
    checkpoint = opened(tmp_path, kind, model)
    with torch.no_grad():
        expected = model(torch.arange(20)[None]).logits
    torch.testing.assert_close(logits_from(checkpoint, kind), expected, rtol=0, atol=0)


def test_config(tmp_path: Path, llama: torch.nn.Module) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 7}
    config = opened(tmp_path, "llama", llama, metadata=ids).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,  # exactly: not the float32 nearest to it
        "rope_theta": 50000.0,
        "vocab_size": 96,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 5,
        "eos_token_id": 7,
    }
    assert {key: config[key] for key in expected} == expected


def test_defaults_of_absent_metadata(tmp_path: Path, llama: torch.nn.Module) -> None:
    absent = ("llama.attention.head_count_kv", "llama.attention.key_length", "llama.rope.freq_base")
    weights = {name: tensor for name, tensor in weights_of(llama).items() if "k_proj" not in name}
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", weights, skip=absent)).config
    assert config["num_key_value_heads"] == HEADS
    assert config["head_dim"] == HIDDEN // HEADS
    assert config["rope_theta"] == 10000.0
    assert "eos_token_id" not in config


def test_no_output_tensor_means_tied(tmp_path: Path) -> None:
    model = tiny_model("llama", tied=True)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", weights_of(model, tied=True)))
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.weights.names()


def test_rope_scaling(tmp_path: Path, llama: torch.nn.Module) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    assert opened(tmp_path, "llama", llama, metadata=scaling).config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


@pytest.mark.parametrize("qtype", [Q.Q8_0, Q.Q4_1, Q.F16, Q.BF16])
def test_load_equals_the_librarys_rounding(tmp_path: Path, llama: torch.nn.Module, qtype: Q) -> None:
    checkpoint = opened(tmp_path, "llama", llama, matrices=qtype, embedding=Q.Q8_0)
    original = weights_of(llama)
    for name in (Q_PROJ, K_PROJ, "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        assert torch.equal(checkpoint.weights.load(name).float(), rounded(original[name], qtype)), name
    embedding = checkpoint.weights.load("model.embed_tokens.weight")
    assert torch.equal(embedding, rounded(original["model.embed_tokens.weight"], Q.Q8_0))
    assert torch.equal(checkpoint.weights.load("model.norm.weight"), original["model.norm.weight"])


def test_packed_types_load_as_float32_and_plain_ones_as_stored(tmp_path: Path, llama: torch.nn.Module) -> None:
    weights = opened(tmp_path, "llama", llama, matrices=Q.BF16, embedding=Q.Q8_0).weights
    assert weights.load("model.embed_tokens.weight").dtype == torch.float32
    for name in weights.names():
        dtype = weights.describe(name).dtype
        if not dtype.startswith("gguf:"):
            assert str(weights.load(name).dtype) == f"torch.{dtype}"


def test_describe(tmp_path: Path, llama: torch.nn.Module) -> None:
    checkpoint = opened(tmp_path, "llama", llama, matrices=Q.Q4_1)
    info = checkpoint.weights.describe("model.layers.0.mlp.down_proj.weight")
    assert info.shape == (64, 96)
    assert info.dtype == "gguf:q4_1"
    assert info.num_bytes == 64 * 96 // 32 * 20  # 32 weights: two float16 and 16 bytes of nibbles
    assert info.file == str(tmp_path / "model.gguf")
    assert checkpoint.weights.describe("model.norm.weight").dtype == "float32"


def test_every_tensor_has_its_hugging_face_name_and_shape(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    weights = opened(tmp_path, "qwen3", model).weights
    described = {name: weights.describe(name).shape for name in weights.names()}
    assert described == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_qwen3_rows_are_left_alone(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    weights = opened(tmp_path, "qwen3", model).weights
    assert torch.equal(weights.load(Q_PROJ), model.state_dict()[Q_PROJ])


def test_loaded_tensors_are_writable_and_outlive_close(tmp_path: Path, llama: torch.nn.Module) -> None:
    with opened(tmp_path, "llama", llama) as checkpoint:
        tensor = checkpoint.weights.load("model.norm.weight")
    tensor.fill_(2.0)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.weights.load("model.norm.weight")


def test_directory_with_one_gguf(tmp_path: Path, llama: torch.nn.Module) -> None:
    write_gguf(tmp_path / "only.gguf", "llama", weights_of(llama))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "gguf"
    assert checkpoint.path == tmp_path / "only.gguf"
    assert checkpoint.generation_config == {}


def test_directory_with_two_gguf(tmp_path: Path, llama: torch.nn.Module) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, "llama", weights_of(llama))
    with pytest.raises(CheckpointError, match=r"give the path of one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_safetensors_win_in_a_mixed_directory(tmp_path: Path, llama: torch.nn.Module) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", weights_of(llama))
    write_directory(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}})
    assert open_checkpoint(tmp_path).format == "safetensors"


def test_unknown_architecture(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"'gemma' cannot be read from GGUF \(only llama, qwen3\)"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", "gemma", weights_of(llama)))


def test_experts_are_refused(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match="expert layers"):
        opened(tmp_path, "llama", llama, metadata={"llama.expert_count": 8})


def test_partial_rotary_is_refused(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match="8 of 16 head dimensions"):
        opened(tmp_path, "llama", llama, metadata={"llama.rope.dimension_count": 8})


def test_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key in ("embedding_length", "block_count", "attention.head_count", "feed_forward_length", "context_length"):
        writer.add_uint32(f"llama.{key}", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 2), np.float32))
    writer.add_tensor("rope_freqs.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tensor 'rope_freqs\.weight' is not known"):
        open_checkpoint(tmp_path / "m.gguf")


def test_missing_metadata(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"metadata 'llama\.block_count' is missing"):
        opened(tmp_path, "llama", llama, skip=("llama.block_count",))


@pytest.mark.parametrize("value", [0, "4", 4.0, [4, 4]])
def test_metadata_of_another_kind(tmp_path: Path, llama: torch.nn.Module, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'llama\.attention\.head_count' is .*, expected a positive int"):
        opened(tmp_path, "llama", llama, metadata={"llama.attention.head_count": value})


def test_rows_that_do_not_fit_the_heads(tmp_path: Path, llama: torch.nn.Module) -> None:
    weights = opened(tmp_path, "llama", llama, metadata={"llama.attention.head_count": 5}).weights
    with pytest.raises(CheckpointError, match="64 rows do not fit 5 heads"):
        weights.load(Q_PROJ)


def test_sliding_window(tmp_path: Path, llama: torch.nn.Module) -> None:
    window = {"llama.attention.sliding_window": 32}
    assert opened(tmp_path, "llama", llama, metadata=window).config["sliding_window"] == 32
    assert "sliding_window" not in opened(tmp_path, "llama", llama).config


def test_split_file(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match="merge them into one"):
        opened(tmp_path, "llama", llama, metadata={"split.count": 3})


def test_unknown_tensor(tmp_path: Path, llama: torch.nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"model\.gguf: the checkpoint has no tensor 'z'"):
        opened(tmp_path, "llama", llama).weights.load("z")


def test_arrays_read_as_the_library_reads_them(tmp_path: Path, llama: torch.nn.Module) -> None:
    arrays = {"x.strings": ["a", "", "é木", "b" * 300], "x.ints": [1, -2, 3], "x.floats": [0.5, 1.5], "x.bools": [True]}
    path = write_gguf(tmp_path / "m.gguf", "llama", weights_of(llama), metadata=arrays)
    metadata = GGUFFile(path).metadata
    reader = gguf.GGUFReader(path)
    assert {key: metadata[key] for key in arrays} == arrays
    assert {key: reader.fields[key].contents() for key in reader.fields} == dict(metadata)


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 700, -40])
def test_truncated_file(tmp_path: Path, llama: torch.nn.Module, kept: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", weights_of(llama), metadata={"x.strings": ["abc"] * 40})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"m\.gguf: not a whole GGUF file"):
        open_checkpoint(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_header_never_escapes_as_another_error(
    tmp_path: Path, llama: torch.nn.Module, position: float, value: int
) -> None:
    path = tmp_path / "damaged.gguf"
    if not path.exists():
        write_gguf(path, "llama", weights_of(llama), metadata={"x.strings": ["abc"] * 4, "x.ints": [1, 2]})
        (tmp_path / "whole").write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "whole").read_bytes())
    data[int(position * 2500)] = value  # metadata and the tensor table lie in these bytes
    path.write_bytes(data)
    message = ""
    try:
        checkpoint = open_checkpoint(path)
        assert all(checkpoint.weights.describe(name).num_bytes >= 0 for name in checkpoint.weights.names())
    except CheckpointError as error:
        message = str(error)
    assert not message or "damaged.gguf" in message


def test_kv_heads_differ_from_heads() -> None:
    """The tests above tell q from k only because their head counts differ."""
    assert HEADS != KV_HEADS
