"""One process of several that share the experts of a DeepSeek-V4: imported by each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from v4.stepper import Stepper

from deepinfer_core.api import ExpertPlacement, ExpertShare, ProcessGroup

Steps = list[list[tuple[int, list[int], int]]]
INVARIANT = {"features.batch_invariant": True}


def logprobs(group: ProcessGroup, path: Path, placement: ExpertPlacement, steps: Steps) -> tuple[list[Any], list[str]]:
    """Log-probabilities of every step, and the tensors that were read."""
    read: list[str] = []
    share = ExpertShare(placement=placement, rank=group.rank)
    stepper = Stepper(path, read=read, experts=share, group=group, **INVARIANT)
    return [stepper.step(parts).numpy() for parts in steps], read
