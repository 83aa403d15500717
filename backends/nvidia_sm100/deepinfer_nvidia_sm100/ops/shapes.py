"""What several kernels need of a tensor before they launch."""

from __future__ import annotations

import torch
import triton


def power_of_two(number: int) -> int:
    """The next power of two, at least ``number``."""
    result: int = triton.next_power_of_2(number)
    return result


def heads_view(x: torch.Tensor) -> torch.Tensor:
    """``[..., width]`` as ``[A, B, width]`` with a dense last dimension, without a copy where strides allow."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.reshape(-1, 1, x.shape[-1])
