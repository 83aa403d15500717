"""A step between its launch and its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from deepinfer_core.api import Event, LogprobsResult, ModelBatch, VerifyCost

from .constraint_masks import StepMasks
from .prompt_logprobs import PromptRows
from .sampler import Sampled
from .slot_needs import SamplingNeeds
from .speculation_rows import Proposed
from .step_inputs import StepInputs
from .step_plan import StepPlan


@attrs.frozen(kw_only=True)
class ReadyStep:
    """A step as it runs: its drafts are known."""

    plan: StepPlan
    inputs: StepInputs
    needs: SamplingNeeds


@attrs.define(kw_only=True)
class StepResult:
    """Device results of one step. ``prompts`` pairs with ``ready.inputs.prompts``; ``cost`` is of a drafting step;
    ``masks`` are those of the sampled rows, when some follow a grammar."""

    ready: ReadyStep
    sampled: Sampled | None
    prompts: list[LogprobsResult]
    proposed: Proposed | None = None
    cost: VerifyCost | None = None
    masks: StepMasks | None = None


FillMasks = Callable[[StepPlan], StepMasks]
"""Begins to fill the masks of a step whose drafts are known, and whose predecessors are committed."""


@attrs.define(kw_only=True)
class LaunchedStep:
    """A step on its way: what was planned, the prompt rows asked for, and the event of its end.

    Attributes:
        masks: being filled or filled, if any. held: gives the stream the sampling of a step that waits for masks.
    """

    plan: StepPlan
    prompts: list[PromptRows]
    event: Event[StepResult]
    masks: list[StepMasks] = attrs.field(factory=list)
    held: Callable[[StepMasks], Event[StepResult]] | None = None

    def sample(self, masks: StepMasks) -> None:
        """Go on with a held step, whose masks are being filled."""
        assert self.held is not None
        self.masks.append(masks)
        self.event, self.held = self.held(masks), None


@attrs.frozen
class Passed:
    """What the forward pass leaves: ``[T, hidden]``, the batch and taps of a drafter, prompts' log-probabilities."""

    hidden: torch.Tensor
    batch: ModelBatch | None
    taps: Sequence[torch.Tensor]
    prompts: list[LogprobsResult]
    started: float
