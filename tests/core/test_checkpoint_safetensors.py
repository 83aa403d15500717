"""Directories of safetensors: found, described, memory-mapped, and refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_support import write_directory, write_json

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import open_checkpoint

A = torch.arange(6, dtype=torch.float32).reshape(2, 3)
B = torch.arange(4, dtype=torch.int64)


def test_single_file(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A, "b": B}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.path == tmp_path
        assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
        assert sorted(checkpoint.weights.names()) == ["a", "b"]
        assert torch.equal(checkpoint.weights.load("a"), A)
        assert torch.equal(checkpoint.weights.load("b"), B)


def test_a_path_may_be_a_string(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    assert open_checkpoint(str(tmp_path)).path == tmp_path


def test_shards_by_index(tmp_path: Path) -> None:
    write_directory(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}}, index=True)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.weights.load("b"), B)
        assert checkpoint.weights.describe("a").file == str(tmp_path / "one.safetensors")


def test_any_safetensors_without_index(tmp_path: Path) -> None:
    write_directory(tmp_path, {"first.safetensors": {"a": A}, "second.safetensors": {"b": B}})
    assert sorted(open_checkpoint(tmp_path).weights.names()) == ["a", "b"]


def test_model_safetensors_wins_over_other_files(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}, "consolidated.safetensors": {"a": A + 1}})
    assert torch.equal(open_checkpoint(tmp_path).weights.load("a"), A)


def test_same_tensor_in_two_files_without_index(tmp_path: Path) -> None:
    write_directory(tmp_path, {"x.safetensors": {"a": A}, "y.safetensors": {"a": A}})
    with pytest.raises(CheckpointError, match=r"y\.safetensors: tensor 'a' is also in x\.safetensors"):
        open_checkpoint(tmp_path)


def test_generation_config(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    assert open_checkpoint(tmp_path).generation_config == {}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e8m0fnu, "float8_e8m0fnu"),
        (torch.int8, "int8"),
        (torch.int64, "int64"),
        (torch.bool, "bool"),
    ],
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    tensor = torch.ones(2, 5).to(dtype)
    write_directory(tmp_path, {"model.safetensors": {"t": tensor}})
    weights = open_checkpoint(tmp_path).weights
    info = weights.describe("t")
    assert (info.shape, info.dtype, info.num_bytes) == ((2, 5), name, 10 * tensor.element_size())
    loaded = weights.load("t")
    assert loaded.dtype == dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_pairs_of_four_bit_values(tmp_path: Path) -> None:
    tensor = torch.zeros(2, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    write_directory(tmp_path, {"model.safetensors": {"t": tensor}})
    weights = open_checkpoint(tmp_path).weights
    info = weights.describe("t")
    assert (info.shape, info.dtype, info.num_bytes) == (tuple(tensor.shape), "float4_e2m1fn_x2", 12)
    assert weights.load("t").shape == tensor.shape


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"s": torch.tensor(2.5), "e": torch.zeros(0, 4)}})
    weights = open_checkpoint(tmp_path).weights
    assert weights.describe("s").shape == ()
    assert weights.load("s").item() == 2.5
    assert weights.describe("e").num_bytes == 0
    assert weights.load("e").shape == (0, 4)


def test_loading_maps_the_file_instead_of_reading_it(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"big": torch.zeros(16 << 20)}})
    weights = open_checkpoint(tmp_path).weights
    tensor = weights.load("big")
    address = tensor.data_ptr()
    assert any(
        int(start, 16) <= address < int(end, 16) and "model.safetensors" in line
        for line in Path("/proc/self/maps").read_text().splitlines()
        for start, end in [line.split()[0].split("-")]
    )


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    open_checkpoint(tmp_path).weights.load("a").fill_(9)
    assert torch.equal(open_checkpoint(tmp_path).weights.load("a"), A)


def test_tensors_outlive_close_and_loading_stops(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    with open_checkpoint(tmp_path) as checkpoint:
        tensor = checkpoint.weights.load("a")
    assert torch.equal(tensor, A)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.weights.load("a")


def test_unknown_tensor(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    weights = open_checkpoint(tmp_path).weights
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        weights.describe("z")
    with pytest.raises(CheckpointError, match="no tensor 'z'"):
        weights.load("z")


@pytest.mark.parametrize("kept", [0, 4, 20, -3])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    file = write_directory(tmp_path, {"model.safetensors": {"a": A}}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        open_checkpoint(tmp_path)


def test_corrupt_header(tmp_path: Path) -> None:
    file = write_directory(tmp_path, {"model.safetensors": {"a": A}}) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8] = ord("x")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_truncated_shard_is_named_before_anything_loads(tmp_path: Path) -> None:
    write_directory(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}}, index=True)
    file = tmp_path / "two.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    weights = open_checkpoint(tmp_path).weights
    assert weights.describe("a").shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        weights.describe("b")


def test_missing_shard(tmp_path: Path) -> None:
    write_directory(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}}, index=True)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: missing, but model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    write_directory(tmp_path, {"one.safetensors": {"a": A}})
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"gone": "one.safetensors"}})
    with pytest.raises(CheckpointError, match=r"one\.safetensors: tensor 'gone' is missing"):
        open_checkpoint(tmp_path).weights.describe("gone")


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_index_without_weight_map(tmp_path: Path, index: object) -> None:
    write_directory(tmp_path, {"one.safetensors": {"a": A}})
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match="'weight_map' must map"):
        open_checkpoint(tmp_path)


def test_index_may_not_leave_the_directory(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "model", {"one.safetensors": {"a": A}})
    (directory / "one.safetensors").rename(tmp_path / "outside.safetensors")
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"a": "../outside.safetensors"}})
    with pytest.raises(CheckpointError, match="must lie beside the index"):
        open_checkpoint(directory)


def test_missing_config(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing; expected config\.json and") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": A}})
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        open_checkpoint(tmp_path)


def test_config_without_weights(tmp_path: Path) -> None:
    write_directory(tmp_path, {})
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory; give a local path or one of these names: de"):
        open_checkpoint(tmp_path / "absent")


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"expected a directory or a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")
