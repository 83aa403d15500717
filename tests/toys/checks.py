"""What must hold of an engine with nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_core import LLM, RequestOutput


def assert_clean(llm: LLM) -> None:
    """No request, slot, block or step is left over."""
    core = llm.engine.core
    planner, slots, cache = core.planner, core.planner.slots, core.planner.cache
    assert not core.has_unfinished
    assert len(planner.waiting) == 0
    assert len(slots.running) == 0
    assert slots.num_free == slots.slots
    assert not slots.in_flight.any()
    assert [slot for slot, sequence in enumerate(slots.sequence) if sequence is not None] == []
    for name, group in cache.groups.items():
        assert group.pool.num_free == group.pool.num_usable, name
        assert not group.count.any()
        assert not group.first.any()
        assert not group.table.any()
    assert not cache.write_from.any()


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of the first completion of each."""
    return [output.outputs[0].token_ids for output in outputs]


def ends_of(outputs: Sequence[RequestOutput]) -> list[str | None]:
    """Finish reasons of the first completion of each."""
    return [output.outputs[0].finish_reason for output in outputs]


def facts(output: RequestOutput) -> list[dict[str, Any]]:
    """Everything of a result that must not depend on scheduling, one mapping per completion."""
    return [
        {
            "text": c.text,
            "token_ids": c.token_ids,
            "finish_reason": c.finish_reason,
            "stop_reason": c.stop_reason,
            "logprobs": c.logprobs,
            "prompt_logprobs": output.prompt_logprobs,
            "error": None if output.error is None else output.error.code,
        }
        for c in output.outputs
    ]
