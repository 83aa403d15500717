"""Torch dtypes by name, and the dtype that arithmetic on a tensor is done in."""

from __future__ import annotations

import torch

from deepinfer_core.api import ConfigError


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called ``name`` (``"bfloat16"``). Raises ConfigError for anything else."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {name!r} is not a torch dtype; use float32, bfloat16, float16 or float64")
    return found


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of its arithmetic: float64 stays, everything narrower becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in ``dtype``. In FP8, which has no infinity, magnitudes past its largest become the largest."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-448.0, 448.0)
    return tensor.to(dtype)
