"""Checkpoints of dense models whose weights mean more than their numbers are refused, not read as something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys.tiny_llama import write_tiny

from deepinfer_core import LLM
from deepinfer_core.api import CheckpointError, ConfigError

Q = "model.layers.1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]], **fields: object) -> Path:
    write_tiny(folder)
    save_file(dict(change(load_file(folder / "model.safetensors"))), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return folder


def refused(folder: Path, error: type[Exception]) -> str:
    with pytest.raises(error) as caught, LLM(folder, logging={"progress": False}):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"quant_method": "fp8"}, "quant_method='fp8'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quant_method='fp8', weight_block_size=[128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "quant_method='fp8', weight_block_size=[128, 0]"),
        (
            {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
            "quant_method='fp8', fmt='e5m2', weight_block_size=[128, 128]",
        ),
        ({}, "quant_method=None"),
        ("gptq", "quant_method='gptq'"),
    ],
)
def test_a_config_that_says_quantised_is_refused(written: object, said: str, tmp_path: Path) -> None:
    text = refused(changed(tmp_path, dict, quantization_config=written), ConfigError)
    assert text.startswith(f"config.json: quantization_config has {said}: this model family reads weights of")


def test_a_config_that_says_not_quantised_is_read(tmp_path: Path) -> None:
    with LLM(changed(tmp_path, dict, quantization_config=None), logging={"progress": False}):
        pass


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool])
def test_weights_that_are_no_plain_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    def packed(tensors: Tensors) -> Tensors:
        return {**tensors, f"{Q}.weight": tensors[f"{Q}.weight"].to(dtype)}

    name = str(dtype).removeprefix("torch.")
    assert f"tensor '{Q}.weight' is {name}: expected one of float64" in refused(
        changed(tmp_path, packed), CheckpointError
    )


@pytest.mark.parametrize("companion", ["weight_scale_inv", "weight_scale", "scales", "bias"])
def test_a_tensor_beside_a_weight_that_would_not_be_read_is_refused(companion: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: {**tensors, f"{Q}.{companion}": torch.ones(1)})
    text = refused(folder, CheckpointError)
    assert f"tensor '{Q}.{companion}': this model would not read it" in text
    assert "attention_bias" in text


def test_many_are_counted(tmp_path: Path) -> None:
    scales = {
        f"model.layers.{layer}.mlp.{name}_proj.scales": torch.ones(1) for layer in (0, 1) for name in ("up", "down")
    }
    assert "and 1 more" in refused(changed(tmp_path, lambda tensors: tensors | scales), CheckpointError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_plain_floats_and_tensors_of_nobody_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    def stored(tensors: Tensors) -> Tensors:
        plain = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        return {**plain, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(1)}

    with LLM(changed(tmp_path, stored), logging={"progress": False}):
        pass


def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    text = refused(changed(tmp_path, dict, num_hidden_layers=10**9), ConfigError)
    assert text == "config.json: num_hidden_layers=1000000000: expected at most 10000"
