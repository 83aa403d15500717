"""Rotary position embedding with the frequency scalings that Hugging Face checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_core.api import BuildContext, ConfigError, RopeRequest

from .dtypes import widen


def frequencies(request: RopeRequest, device: torch.device) -> tuple[torch.Tensor, float]:
    """``[rotary_dim / 2]`` float32 angles per position, and the factor that multiplies cos and sin.

    Formulas as in Hugging Face's ``rope_scaling``: ``linear`` (Chen et al. 2023, arXiv:2306.15595), ``llama3``
    (Llama 3.1), ``yarn`` (Peng et al. 2023, arXiv:2309.00071). Raises ConfigError for a missing or unknown field.
    """
    scaling = request.scaling
    channels = torch.arange(0, request.rotary_dim, 2, dtype=torch.float32, device=device)
    powers = request.theta ** (channels / request.rotary_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return 1.0 / powers, 1.0
        case "linear":
            return 1.0 / powers / _field(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(1.0 / powers, scaling), 1.0
        case "yarn":
            return _yarn(powers, scaling, request), _yarn_attention_factor(scaling)
    raise ConfigError(f"rope_scaling.rope_type={kind!r} is unknown; use default, linear, llama3 or yarn")


def _field(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if value is None:
        raise ConfigError(f"rope_scaling.{name} is missing; got {dict(scaling)}")
    return float(value)


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    factor = _field(scaling, "factor")
    low = _field(scaling, "low_freq_factor")
    high = _field(scaling, "high_freq_factor")
    original = _field(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, blended)
    return torch.where(wavelength < original / high, plain, scaled)


def _yarn(powers: torch.Tensor, scaling: Mapping[str, Any], request: RopeRequest) -> torch.Tensor:
    """Channels that turn often are kept, those that turn rarely are divided by the factor, a ramp between."""
    dim = request.rotary_dim
    original = _field(scaling, "original_max_position_embeddings")

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(request.theta))

    # A zero or null beta means the paper's value, as in Hugging Face.
    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=powers.device) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (_field(scaling, "factor") * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = _field(scaling, "factor")

    def strength(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return strength(mscale) / strength(mscale_all)
    return strength(1.0)


class Rope:
    """Rotates pairs of the first ``rotary_dim`` channels; the others pass through.

    cos and sin of every position are computed once, in float32, so that a position's values never depend on
    which other positions share its step.
    """

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        inverse, factor = frequencies(request, context.device)
        positions = torch.arange(request.max_positions, dtype=torch.float32, device=context.device)
        angles = positions[:, None] * inverse
        self._cos = angles.cos() * factor
        self._sin = angles.sin() * factor
        self._rotary_dim = request.rotary_dim
        self._interleaved = request.interleaved

    def plan(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> cos and sin, each ``[T, 1, rotary_dim / 2]`` float32."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def run(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape and dtype."""
        cos, sin = plan
        wide = widen(x)
        rotary, rest = wide[..., : self._rotary_dim], wide[..., self._rotary_dim :]
        if self._interleaved:
            first, second = rotary[..., 0::2], rotary[..., 1::2]
        else:
            first, second = rotary.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        pairs = torch.stack(turned, dim=-1).flatten(-2) if self._interleaved else torch.cat(turned, dim=-1)
        return torch.cat((pairs, rest), dim=-1).to(x.dtype)
