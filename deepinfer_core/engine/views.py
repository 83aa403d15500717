"""What a scheduling policy sees: the planner's state as read-only arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.api import RequestArrays, RequestView, SystemView

from .request import Request
from .waiting import RequestIds

if TYPE_CHECKING:
    from .planner import Planner


def request_view(request: Request) -> RequestView:
    return RequestView(
        request_id=request.request_id,
        arrival=request.metrics.arrival,
        prompt_len=len(request.prompt_token_ids),
        max_tokens=request.max_len - len(request.prompt_token_ids),
        priority=request.priority,
        tenant=request.tenant,
        deadline=request.deadline,
        ttft_target=request.ttft_target,
        tpot_target=request.tpot_target,
    )


def make_view(planner: Planner) -> SystemView:
    return SystemView(
        now=planner.clock(),
        step=planner.steps,
        waiting=_waiting(planner),
        running=_running(planner),
        free_blocks=planner.cache.free_blocks,
        total_blocks=planner.cache.total_blocks,
        block_size=planner.cache.block_size,
        max_batch_tokens=planner.max_batch_tokens,
        max_running=planner.slots.slots,
        tenants=planner.waiting.tenants,
        step_cost=_frozen(planner.step_cost.table().copy()),
    )


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _waiting(planner: Planner) -> RequestArrays:
    columns = planner.waiting.columns()
    nothing = _frozen(np.zeros(len(planner.waiting), np.int64))
    return RequestArrays(
        ids=planner.waiting.ids(),
        arrival=columns["arrival"],
        prompt=columns["prompt"],
        cached=columns["cached"],
        computed=nothing,
        output=columns["output"],
        max_tokens=columns["max_tokens"],
        priority=columns["priority"],
        tenant=columns["tenant"],
        deadline=columns["deadline"],
        ttft_target=columns["ttft"],
        tpot_target=columns["tpot"],
        blocks=nothing,
    )


def _running(planner: Planner) -> RequestArrays:
    table, fields = planner.slots, planner.fields
    slots = table.running[np.argsort(fields.number[table.running])]  # oldest arrival first
    return RequestArrays(
        ids=RequestIds(table.sequence, slots),
        arrival=_frozen(fields.arrival[slots]),
        prompt=_frozen(table.prompt_len[slots]),
        cached=_frozen(fields.cached[slots]),
        computed=_frozen(table.computed[slots]),
        output=_frozen(table.committed[slots] - table.prompt_len[slots]),
        max_tokens=_frozen(table.max_len[slots] - table.prompt_len[slots]),
        priority=_frozen(fields.priority[slots]),
        tenant=_frozen(fields.tenant[slots]),
        deadline=_frozen(fields.deadline[slots]),
        ttft_target=_frozen(fields.ttft[slots]),
        tpot_target=_frozen(fields.tpot[slots]),
        blocks=_frozen(planner.cache.held(slots)),
    )
