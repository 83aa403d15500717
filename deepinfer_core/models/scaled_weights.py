"""FP8 weights with a scale for each block, as Hugging Face checkpoints of ``quant_method`` "fp8" keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_core.api import ConfigError, TensorSpec

from .config_fields import sides

STORED = "float8_e4m3fn"
SUFFIX = "_scale_inv"
"""Of the scales' name, behind the weight's. In spite of it weights are multiplied by them."""

NAMED = ("quant_method", "fmt", "weight_block_size")


def scaled_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) that share a scale; None if config.json does not say that weights are quantised.

    Raises:
        ConfigError: they are in another way, and would be read without their scales.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    fields = found if isinstance(found, Mapping) else {"quant_method": found}
    block = sides(fields.get("weight_block_size"))
    if block and fields.get("quant_method") == "fp8" and fields.get("fmt", "e4m3") == "e4m3":
        return block
    given = {"quant_method": None} | {name: fields[name] for name in NAMED if name in fields}
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
    raise ConfigError(
        f"config.json: quantization_config has {shown}: this model family reads weights of 16 or 32 bits, and FP8 ones "
        "(quant_method 'fp8', fmt 'e4m3') with two sides in weight_block_size; use such a checkpoint, or a GGUF file"
    )


def scales(
    weights: Mapping[str, TensorSpec], stored: Mapping[str, str], block: tuple[int, int]
) -> dict[str, TensorSpec]:
    """The scales of those of ``weights`` that are stored in FP8."""
    return {
        name + SUFFIX: TensorSpec(shape=tuple(-(-size // side) for size, side in zip(spec.shape, block, strict=True)))
        for name, spec in weights.items()
        if stored.get(name) == STORED and len(spec.shape) == 2
    }


def widened(data: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """``[out, in]`` in ``dtype``, products rounded to float32 before (float64 for float64).

    Args:
        data: ``[out, in]`` e4m3.
        scale: ``[ceil(out/rows), ceil(in/columns)]``, any floating-point type.
        block: (rows, columns).
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    wide = scale.to(exact)
    for axis, side in enumerate(block):
        wide = wide.repeat_interleave(side, axis).narrow(axis, 0, data.shape[axis])
    return (data.to(exact) * wide).to(dtype)
