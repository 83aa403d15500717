"""What target, drafter and host hand each other in a step of drafting on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import ModelBatch, Proposal

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


def check_proposal(proposal: Proposal, requests: int, depth: int, vocab_size: int) -> None:
    """Refuse what the next step could not verify, while it costs drafts alone.

    Raises:
        TypeError: a tensor has another shape than :class:`Proposal` says, or the tokens are no integers.
    """
    tokens = proposal.tokens
    whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.ndim != 2 or len(tokens) != requests or not whole:
        raise TypeError(f"drafts of shape {tuple(tokens.shape)}, {tokens.dtype}: expected int64 [{requests}, n]")
    least = min(depth, tokens.shape[1])
    for name, rest in (("confidence", ()), ("notes", ()), ("scores", (vocab_size,))):
        given = getattr(proposal, name)
        if given is None:
            continue
        shape = tuple(given.shape)
        if len(shape) != 2 + len(rest) or (shape[0], *shape[2:]) != (requests, *rest) or shape[1] < least:
            wanted = ", ".join(map(str, (requests, least, *rest)))
            raise TypeError(f"{name} of shape {shape}: expected [{wanted}], as many drafts as there are tokens")


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
