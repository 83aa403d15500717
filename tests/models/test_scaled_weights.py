"""FP8 checkpoints of dense models give what plain ones of the same numbers, worked out in float64, give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys.tiny_llama import write_tiny
from toys.tiny_qwen3 import write_tiny_qwen3

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import CheckpointError

BLOCK = (32, 24)
"""No size of the models is a multiple of both."""
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=2)
PROMPTS = [[5, 9, 3], [7] * 20, list(range(1, 30))]


def in_blocks(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = (torch.arange(size) // side for size, side in zip(shape, BLOCK, strict=True))
    return scale[rows][:, columns]


def quantised(weight: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales, by the largest magnitude of each block and a random part of it: scales are any numbers."""
    shape = tuple(-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True))
    scale = torch.empty(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = weight[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
            scale[i, j] = part.abs().max() / 448 * (1 + torch.rand(()))
    scale = scale.to(kind)
    return (weight / in_blocks(scale.float(), weight.shape)).to(torch.float8_e4m3fn), scale


@pytest.fixture(params=["llama", "qwen3"])
def plain(request: Any, tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    path.mkdir()
    return write_tiny(path) if request.param == "llama" else write_tiny_qwen3(path)


def scaled(plain: Path, kind: torch.dtype = torch.float32, **changes: Any) -> Path:
    """An FP8 checkpoint beside ``plain``, whose weights become the numbers that it means."""
    folder = plain.parent / "fp8"
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    packed, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            packed[name], packed[name + "_scale_inv"] = data, scale = quantised(tensor.float(), kind)
            meant[name] = (data.double() * in_blocks(scale.double(), data.shape)).float()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head"],
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def outputs(folder: Path) -> list[Any]:
    with LLM(folder, logging={"progress": False}) as llm:
        answers = llm.generate(PROMPTS, PARAMS)
    return [(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in answers]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_is_the_plain_checkpoint_of_the_same_numbers(plain: Path, kind: torch.dtype) -> None:
    """Bit for bit: a product of four and 24 bits is rounded once, here and there."""
    folder = scaled(plain, kind)
    assert outputs(folder) == outputs(plain)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, name: t.pop(name + "_scale_inv"), "{name}_scale_inv"),
        (lambda t, name: t.update({name + "_scale_inv": torch.ones(1, 1)}), "{name}_scale_inv"),
        (lambda t, name: t.update({name + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)}), "{name}_scale_inv"),
        (lambda t, name: t.update({name[:-6] + "input_scale": torch.ones(())}), "input_scale"),
        (lambda t, name: t.update({name: t[name].to(torch.float8_e5m2)}), "float8_e5m2"),
    ],
)
def test_scales_that_are_not_there_or_of_another_kind(plain: Path, change: Any, says: str) -> None:
    folder, name = scaled(plain), "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=says.format(name=name)), LLM(folder, logging={"progress": False}):
        pass
