"""Does a checkpoint hold what a model reads? Answered from headers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_core.api import CheckpointError, TensorSpec, WeightSource

_LISTED = 10


def check_tensors(weights: WeightSource, expected: Mapping[str, TensorSpec]) -> None:
    """Compare ``weights`` with what a model ``expected``.

    Raises one CheckpointError that lists the first ten missing tensors and wrong shapes and counts the rest.
    Tensors that nobody expects are ignored; optional ones may be missing, but not of another shape.
    """
    present = set(weights.names())
    problems = []
    for name, spec in expected.items():
        if name in present:
            info = weights.describe(name)
            if info.shape != spec.shape:
                problems.append(
                    f"{info.file}: tensor {name!r}: found shape {list(info.shape)}, expected {list(spec.shape)}"
                )
        elif not spec.optional:
            problems.append(f"tensor {name!r}: missing from the checkpoint, expected shape {list(spec.shape)}")
    if not problems:
        return
    listed = problems[:_LISTED]
    if more := len(problems) - len(listed):
        listed.append(f"and {more} more")
    count = "1 tensor does" if len(problems) == 1 else f"{len(problems)} tensors do"
    raise CheckpointError("\n  ".join([f"{count} not fit the model:", *listed]))
