"""Host arrays of one step, snapshotted when it is planned, so that the next one may be planned meanwhile."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from .device_state import SlotRow
from .kv_cache import KVCache
from .prompt_logprobs import PromptRows
from .step_plan import StepPlan

Array = np.ndarray[Any, Any]


@attrs.define(kw_only=True)
class DraftInputs:
    """Draft tokens to write into the history before the step: ``[D]`` int64 each."""

    slots: Array
    positions: Array
    tokens: Array


@attrs.define(kw_only=True)
class StepInputs:
    """T rows of R requests, of which N are sampled.

    Attributes:
        row_requests, row_slots, positions: ``[T]``.
        cu_seqlens: ``[R+1]``; seq_lens, counts: ``[R]``. All int32.
        tables: cache group -> ``[R, B]`` int32 block table.
        redirect_below: ``[R]``, or None; rows at positions below it leave the cache alone.
        sample_rows, sample_slots, sample_positions: ``[N]``; positions are those of the tokens produced.
        drafts: None when nothing is verified. entering: sequences new to their slots.
        prompts: rows whose prompt log-probabilities are wanted.
    """

    row_requests: Array
    row_slots: Array
    positions: Array
    cu_seqlens: Array
    seq_lens: Array
    counts: Array
    tables: dict[str, Array]
    redirect_below: Array | None
    sample_rows: Array
    sample_slots: Array
    sample_positions: Array
    drafts: DraftInputs | None
    entering: list[SlotRow]
    prompts: list[PromptRows]


@attrs.frozen(kw_only=True)
class Snapshot:
    """What is copied from the host's tables when a step is planned; fields as in :class:`StepInputs`."""

    tables: dict[str, Array]
    redirect_below: Array | None
    entering: list[SlotRow]
    prompts: list[PromptRows]
    planned_rows: int


def snapshot(plan: StepPlan, cache: KVCache, prompts: list[PromptRows], spare: int) -> Snapshot:
    """``spare``: tokens past the step's rows that the tables must cover, where they have blocks for them."""
    width = cache.blocks_for(int((plan.starts + plan.counts).max()) + spare)
    redirect = cache.write_from[plan.slots]
    return Snapshot(
        tables={name: group.table[plan.slots, :width] for name, group in cache.groups.items()},
        redirect_below=redirect if redirect.any() else None,
        entering=[SlotRow(s.slot, s.tokens, s) for s in plan.admitted],
        prompts=prompts,
        planned_rows=int(plan.counts.sum()),
    )


def step_inputs(plan: StepPlan, taken: Snapshot) -> StepInputs:
    """Everything the device needs to know about a step whose drafts are known."""
    slots, counts = plan.slots, plan.counts
    ends = np.cumsum(counts)
    row_requests = np.repeat(np.arange(len(slots)), counts)
    seq_lens = plan.starts + counts
    fewer = taken.planned_rows - int(ends[-1])  # decode rows come first, so drafts that fell away move prompt rows up
    prompts = [attrs.evolve(p, first_row=p.first_row - fewer) for p in taken.prompts] if fewer else taken.prompts
    return StepInputs(
        row_requests=row_requests,
        row_slots=slots[row_requests],
        positions=np.arange(int(ends[-1])) + np.repeat(plan.starts - (ends - counts), counts),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        counts=counts.astype(np.int32),
        tables=taken.tables,
        redirect_below=taken.redirect_below,
        sample_rows=_last(ends, plan.samples) - 1,
        sample_slots=np.repeat(slots, plan.samples),
        sample_positions=_last(seq_lens, plan.samples),
        drafts=_drafts(plan) if plan.drafts else None,
        entering=taken.entering,
        prompts=prompts,
    )


def _last(ends: Array, samples: Array) -> Array:
    """``samples[i]`` consecutive numbers up to ``ends[i]``, for each i in turn."""
    if samples.all() and int(samples.sum()) == len(samples):
        return ends  # decoding without drafts
    total = np.cumsum(samples)
    before_end = np.repeat(total, samples) - 1 - np.arange(int(total[-1]))
    last: Array = np.repeat(ends, samples) - before_end
    return last


def _drafts(plan: StepPlan) -> DraftInputs:
    start = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
    lengths = [len(tokens) for tokens in plan.drafts.values()]
    positions = [np.arange(start[slot] + 1, start[slot] + 1 + len(tokens)) for slot, tokens in plan.drafts.items()]
    return DraftInputs(
        slots=np.repeat(np.array(list(plan.drafts), np.int64), lengths),
        positions=np.concatenate(positions),
        tokens=np.concatenate(list(plan.drafts.values())).astype(np.int64),
    )
