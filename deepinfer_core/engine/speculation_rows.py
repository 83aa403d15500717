"""What target, drafter and host hand each other in a step of drafting on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import ModelBatch

from .step_plan import StepPlan

if TYPE_CHECKING:
    from .step_inputs import StepInputs

Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True)
class BlockRows:
    """Rows that a drafter runs on its own: ``counts`` of each of R requests from ``starts`` on, in their ``tables``."""

    starts: Array
    counts: Array
    tables: Mapping[str, Array]


@attrs.frozen(kw_only=True)
class Proposed:
    """What the host learns of new drafts: ``slots [R]``, ``chances [R, n]`` float64 survival, 0 where there is none.

    ``learned`` as in Proposal.
    """

    slots: Array
    chances: Array
    learned: bool


@attrs.define(kw_only=True)
class Pending:
    """Drafts made by the last step. Arrays run over the R requests it drafted for.

    ``row``: slot -> its number among them, or -1. ``available``: drafts that are tokens. ``scores`` and ``notes`` as in
    Proposal.
    """

    row: Array
    anchors: Array
    tokens: Array
    available: Array
    confidence: Array | None
    chances: Array
    scores: torch.Tensor | None
    notes: Array | None


@attrs.frozen(kw_only=True)
class TargetRows:
    """What the target ran in this step, and ``tokens [N]`` it sampled, None where no drafts are concerned.

    ``batch`` is None where a graph ran; it has the module's cache groups where there are drafts.
    """

    plan: StepPlan
    inputs: StepInputs
    batch: ModelBatch | None
    taps: Sequence[torch.Tensor]
    tokens: Array | None
    active: frozenset[str]
