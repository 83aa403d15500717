"""Rotary position embedding with the frequency scalings that Hugging Face checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

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


class RopeTable:
    """cos and sin of every position, ``[max_positions, rotary_dim / 2]`` float32.

    Computed once, so that a position's values never depend on which other positions share its step; long contexts
    make it large, so operators with the same angles share one (:func:`rope_table`).
    """

    def __init__(self, request: RopeRequest, device: torch.device) -> None:
        inverse, factor = frequencies(request, device)
        positions = torch.arange(request.max_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * inverse
        self.cos = angles.cos() * factor
        self.sin = angles.sin() * factor


_TABLES: WeakValueDictionary[tuple[Any, ...], RopeTable] = WeakValueDictionary()


def rope_table(request: RopeRequest, device: torch.device) -> RopeTable:
    """The table of these angles on this device, shared while anything uses it."""
    scaling = tuple(sorted((name, str(value)) for name, value in request.scaling.items()))
    key = (request.rotary_dim, request.theta, request.max_positions, scaling, str(device))
    table = _TABLES.get(key)
    if table is None:
        table = _TABLES[key] = RopeTable(request, device)
    return table


class Rope:
    """Rotates pairs of the first, or last, ``rotary_dim`` channels; the others pass through."""

    def __init__(self, request: RopeRequest, context: BuildContext) -> None:
        self._table = rope_table(request, context.device)
        self._rotary_dim = request.rotary_dim
        self._start = request.head_dim - request.rotary_dim if request.trailing else 0
        self._interleaved = request.interleaved

    def plan(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> cos and sin, each ``[T, 1, rotary_dim / 2]`` float32."""
        return self._table.cos[positions][:, None], self._table.sin[positions][:, None]

    def run(self, x: torch.Tensor, plan: tuple[torch.Tensor, torch.Tensor], inverse: bool = False) -> torch.Tensor:
        """``[T, heads, head_dim]`` -> same shape and dtype; ``inverse`` turns the other way."""
        cos, sin = plan
        if inverse:
            sin = -sin
        wide = widen(x)
        start, end = self._start, self._start + self._rotary_dim
        rotary = wide[..., start:end]
        if self._interleaved:
            first, second = rotary[..., 0::2], rotary[..., 1::2]
        else:
            first, second = rotary.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        pairs = torch.stack(turned, dim=-1).flatten(-2) if self._interleaved else torch.cat(turned, dim=-1)
        return torch.cat((wide[..., :start], pairs, wide[..., end:]), dim=-1).to(x.dtype)
