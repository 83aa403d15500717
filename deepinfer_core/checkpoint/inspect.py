"""What a checkpoint holds, from its headers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import attrs

from .opening import Checkpoint


@attrs.frozen(kw_only=True)
class DtypeUsage:
    """Tensors stored in one dtype: how many, and their bytes."""

    tensors: int = 0
    num_bytes: int = 0


@attrs.frozen(kw_only=True)
class CheckpointSummary:
    """What :func:`summarise` found.

    Attributes:
        architecture: first of config.json's ``architectures``, None when it names none.
        format: ``"safetensors"`` or ``"gguf"``.
        num_parameters: stored elements. Tied weights count once; bytes that pack two 4-bit values count as one.
        num_bytes: stored bytes of all tensors.
        dtypes: dtype as in ``TensorInfo.dtype`` -> usage, most bytes first.
    """

    architecture: str | None
    format: str
    num_parameters: int
    num_bytes: int
    dtypes: Mapping[str, DtypeUsage]


def summarise(checkpoint: Checkpoint) -> CheckpointSummary:
    """Count what ``checkpoint`` stores, without loading a tensor."""
    infos = [checkpoint.weights.describe(name) for name in checkpoint.weights.names()]
    usage: dict[str, DtypeUsage] = {}
    for info in infos:
        seen = usage.get(info.dtype, DtypeUsage())
        usage[info.dtype] = DtypeUsage(tensors=seen.tensors + 1, num_bytes=seen.num_bytes + info.num_bytes)
    architectures = checkpoint.config.get("architectures") or [None]
    return CheckpointSummary(
        architecture=architectures[0],
        format=checkpoint.format,
        num_parameters=sum(prod(info.shape) for info in infos),
        num_bytes=sum(info.num_bytes for info in infos),
        dtypes=dict(sorted(usage.items(), key=lambda item: (-item[1].num_bytes, item[0]))),
    )
