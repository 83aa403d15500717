"""Rotary angles: interleaved pairs on a vector's last channels, YaRN without an amplitude factor."""

from __future__ import annotations

import math

import torch

from .shape import Kind, Shape

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each ``[positions, rotary / 2]`` float32."""


def angles(shape: Shape, kind: Kind, length: int, device: torch.device) -> Angles:
    """Of positions ``0 .. length - 1`` for one kind of layer."""
    half = torch.arange(0, shape.rotary, 2, dtype=torch.float32, device=device) / shape.rotary
    theta = shape.theta if kind == "window" else shape.compressed_theta
    frequency = theta**-half
    if kind != "window" and shape.yarn is not None:
        factor, original, fast, slow = shape.yarn

        def channel(turns: float) -> float:
            return shape.rotary * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), shape.rotary - 1)
        ramp = ((torch.arange(len(half), device=device) - low) / max(high - low, 0.001)).clamp(0, 1)
        frequency = frequency / factor * ramp + frequency * (1 - ramp)
    turned = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, table: Angles, *, back: bool = False) -> torch.Tensor:
    """``x [B, T, ..., d]``, position of row t being the table's row t -> same shape and dtype."""
    cos, sin = table
    between = (1,) * (x.dim() - 3)
    cos, sin = (t.view(t.shape[0], *between, t.shape[1]) for t in (cos, sin))
    if back:
        sin = -sin
    start = x.shape[-1] - 2 * cos.shape[-1]
    kept, turned = x[..., :start], x[..., start:].float()
    first, second = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((kept, pairs.to(x.dtype)), dim=-1)
