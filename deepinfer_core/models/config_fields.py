"""Reading config.json: each field checked, each error naming field, value and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core.api import ConfigError

MOST_LAYERS = 10_000
"""Layers of a model; what a file says beyond is a mistake, and would take all memory to write down."""


def whole(config: Mapping[str, Any], name: str, default: int | None = None, most: int | None = None) -> int:
    """A positive integer field, of ``most`` at most."""
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name}={value!r}: expected an integer >= 1")
    if most is not None and value > most:
        raise ConfigError(f"config.json: {name}={value}: expected at most {most}")
    return value


def real(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive number field."""
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"config.json: {name}={value!r}: expected a number > 0")
    return float(value)


def one_of(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """A field that must have one of a few values."""
    value = config.get(name, default)
    if value not in allowed:
        raise ConfigError(f"config.json: {name}={value!r}: this model family supports {', '.join(map(repr, allowed))}")
    return value


def sides(value: Any) -> tuple[int, int] | None:
    """The (rows, columns) that ``weight_block_size`` gives; None if it is no pair of positive integers."""
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value):
        return value[0], value[1]
    return None


def rope_fields(config: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling) from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``.

    Scaling is empty for plain rotary embedding.
    """
    merged: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"config.json: {name}={table!r}: expected an object")
        merged.update(table)
    given = merged.pop("rope_theta", None)
    theta = real({"rope_theta": config.get("rope_theta") if given is None else given}, "rope_theta", 10000.0)
    kind = merged.get("rope_type", merged.pop("type", "default"))
    if kind == "default":
        return theta, {}
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"config.json: rope_type={kind!r}: expected 'default', 'linear', 'llama3' or 'yarn'")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if merged.get(name) is not None:
            real(merged, name)
    merged["rope_type"] = kind
    merged.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return theta, merged
