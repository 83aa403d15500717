"""What a planned step computes, in the numbers that decide what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.api.simulation import StepShape

from .slot_table import SlotTable

if TYPE_CHECKING:
    from .step_plan import StepPlan


def prompt_rows(plan: StepPlan, slots: SlotTable) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Mask over the plan's requests: rows of prompts, or recomputed. Decode rows and their drafts all yield tokens."""
    mask: np.ndarray[Any, np.dtype[np.bool_]] = plan.counts != plan.samples
    return mask | (plan.starts < slots.prompt_len[plan.slots])


def step_shape(plan: StepPlan, slots: SlotTable) -> StepShape:
    """Row r of a request attends to the positions up to its own: ``start + r + 1`` of them."""
    chunks = prompt_rows(plan, slots)
    context = plan.counts * plan.starts + plan.counts * (plan.counts + 1) // 2
    prefill, prefill_context = int(plan.counts[chunks].sum()), int(context[chunks].sum())
    return StepShape(
        prefill,
        plan.num_tokens - prefill,
        int(plan.samples.sum()),
        prefill_context,
        int(context.sum()) - prefill_context,
    )
