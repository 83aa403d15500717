"""What a scheduling policy sees: read-only copies of the planner's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer_core.api import RequestArrays, RequestView, SystemView

from .request import Request

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
    count = len(planner.waiting)
    whole = {name: _frozen(values.astype(np.int64)) for name, values in columns.items() if name in _WHOLE}
    return RequestArrays(
        ids=planner.waiting.ids(),
        arrival=_frozen(columns["arrival"]),
        prompt=whole["prompt"],
        cached=whole["cached"],
        computed=_frozen(np.zeros(count, np.int64)),
        output=whole["output"],
        max_tokens=whole["max_tokens"],
        priority=whole["priority"],
        tenant=whole["tenant"],
        deadline=_frozen(columns["deadline"]),
        ttft_target=_frozen(columns["ttft"]),
        tpot_target=_frozen(columns["tpot"]),
        blocks=_frozen(np.zeros(count, np.int64)),
    )


_WHOLE = ("prompt", "cached", "output", "max_tokens", "priority", "tenant")


def _running(planner: Planner) -> RequestArrays:
    table = planner.slots
    slots = np.array(table.by_arrival(), np.int64)
    requests = [sequence.request for sequence in (table.sequence[s] for s in slots.tolist()) if sequence is not None]

    def times(name: str) -> np.ndarray[Any, Any]:
        return _frozen(np.array([np.inf if (v := getattr(r, name)) is None else v for r in requests], np.float64))

    return RequestArrays(
        ids=[r.request_id for r in requests],
        arrival=_frozen(np.array([r.metrics.arrival for r in requests], np.float64)),
        prompt=_frozen(table.prompt_len[slots]),
        cached=_frozen(np.array([r.metrics.cached_tokens for r in requests], np.int64)),
        computed=_frozen(table.computed[slots]),
        output=_frozen(table.committed[slots] - table.prompt_len[slots]),
        max_tokens=_frozen(table.max_len[slots] - table.prompt_len[slots]),
        priority=_frozen(np.array([r.priority for r in requests], np.int64)),
        tenant=_frozen(np.array([planner.waiting.tenant_index(r.tenant) for r in requests], np.int64)),
        deadline=times("deadline"),
        ttft_target=times("ttft_target"),
        tpot_target=times("tpot_target"),
        blocks=_frozen(planner.cache.held(slots)),
    )
