"""Prefix ids of a trace as block numbers of an engine whose blocks have another size."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import ConfigError


def engine_blocks(ids: Sequence[int], prompt: int, id_tokens: int, block_size: int) -> list[int]:
    """A number for each full engine block of the prompt that ``ids`` say something about.

    Args:
        ids: one for every ``id_tokens`` tokens, each standing for everything up to its end; the last may be partial.
        prompt: tokens.

    Raises:
        ConfigError: neither size divides the other.
    """
    if id_tokens % block_size == 0:
        parts = id_tokens // block_size
        known = min(prompt // block_size, parts * len(ids))
        return [ids[i // parts] * parts + i % parts for i in range(known)]
    if block_size % id_tokens == 0:
        whole = block_size // id_tokens
        return [ids[(i + 1) * whole - 1] for i in range(min(prompt // block_size, len(ids) // whole))]
    raise ConfigError(
        f"--block-size {block_size}: the trace's prefix ids stand for {id_tokens} tokens each: "
        "expected a divisor or a multiple of that"
    )
