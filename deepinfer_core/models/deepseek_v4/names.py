"""Tensor names: the released ones are ours; what transformers saves is mapped onto them.

transformers' differences on disk: a prefix ``model.``, ``embed_tokens`` for ``embed``, ``hc_head.hc_X`` for
``hc_head_X``, and ``attn.norm`` for ``attn.kv_norm``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from deepinfer_core.api import CheckpointError

_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"\.attn\.norm\.weight$"), ".attn.kv_norm.weight"),
)


def released_name(stored: str) -> str:
    """The released name of a tensor stored under ``stored``."""
    for pattern, replacement in _RENAMED:
        stored = pattern.sub(replacement, stored, count=1)
    return stored


def stored_names(names: Iterable[str]) -> Mapping[str, str]:
    """Released name -> name in this checkpoint.

    Raises:
        CheckpointError: two tensors of the checkpoint would be the same one.
    """
    found: dict[str, str] = {}
    for name in names:
        released = released_name(name)
        if released in found:
            raise CheckpointError(f"tensors {found[released]!r} and {name!r} are both {released!r}: remove one")
        found[released] = name
    return found


def layer_prefix(layer: int) -> str:
    """Names of a main layer begin with this."""
    return f"layers.{layer}."


def draft_prefix(stage: int) -> str:
    """Names of a draft stage begin with this."""
    return f"mtp.{stage}."
