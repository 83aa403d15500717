"""Refuses checkpoints whose weights mean more than their numbers: packed, scaled, or with a bias the model lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deepinfer_core.api import CheckpointError

from .scaled_weights import SUFFIX

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_LISTED = 3


def refuse_companions(expected: Iterable[str], stored: Mapping[str, str]) -> None:
    """CheckpointError if a weight is stored as no plain number, or has a tensor beside it that nobody would read.

    Args:
        expected: the tensors that the model reads; scales among them say that their weights may be FP8.
        stored: dtype of each tensor of the checkpoint, as in ``ModelOptions.stored``.
    """
    wanted = set(expected)
    owners = {name.removesuffix(".weight") for name in wanted if name.endswith(".weight")}
    problems = [
        f"tensor {name!r} is {stored[name]}: expected one of {', '.join(_FLOATS)}"
        for name in wanted & stored.keys()
        if name + SUFFIX not in wanted and stored[name] not in _FLOATS and not stored[name].startswith("gguf:")
    ]
    problems += [
        f"tensor {name!r}: this model would not read it, and so compute something else than the checkpoint means"
        for name in stored.keys() - wanted
        if name.rpartition(".")[0] in owners
    ]
    if not problems:
        return
    listed = sorted(problems)[:_LISTED]
    if more := len(problems) - len(listed):
        listed.append(f"and {more} more")
    fix = "use a checkpoint of plain weights, or say in config.json what it has (attention_bias, mlp_bias)"
    raise CheckpointError("\n  ".join(["the checkpoint holds more than this model reads:", *listed, fix]))
