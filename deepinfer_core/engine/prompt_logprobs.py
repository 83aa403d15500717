"""Log-probabilities of prompt tokens: which rows of a step give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from .request import Request
from .slot_needs import alternatives
from .slot_table import SlotTable

if TYPE_CHECKING:
    from .step_plan import StepPlan

Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True)
class PromptRows:
    """Consecutive rows of one request's prompt chunk.

    Attributes:
        first_row: row of the step; row i predicts the prompt token at ``first_position + i``.
        targets: those tokens, int64.
        k: alternatives wanted.
    """

    request: Request
    first_row: int
    first_position: int
    targets: Array
    k: int


def prompt_rows(plan: StepPlan, slots: SlotTable, row_starts: Array, vocab_size: int) -> list[PromptRows]:
    """Rows of this step that predict prompt tokens whose log-probabilities are wanted and not yet known.

    Only a request's first completion computes them. After a preemption, replayed rows are not asked again.
    """
    found = []
    for slot, start, count, row in zip(
        plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), row_starts.tolist(), strict=True
    ):
        sequence = slots.sequence[slot]
        assert sequence is not None
        request = sequence.request
        k = request.params.prompt_logprobs
        if k is None or sequence.child != 0:
            continue
        first = max(start + 1, request.prompt_rows_planned)
        last = min(start + count + 1, sequence.prompt_len)
        if first < last:
            request.prompt_rows_planned = last
            targets = np.array(request.prompt_token_ids[first:last], np.int64)
            found.append(
                PromptRows(
                    request=request,
                    first_row=row + first - 1 - start,
                    first_position=first,
                    targets=targets,
                    k=alternatives(k, vocab_size),
                )
            )
    return found
