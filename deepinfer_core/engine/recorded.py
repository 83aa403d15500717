"""Recorded traces as the simulator takes them, and the comparison of its steps with those that were recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.api import ConfigError, Policy
from deepinfer_core.api.simulation import (
    RecordedStep,
    RecordedTrace,
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    StepShape,
)

from .simulated import SimulatedEngine
from .trace_file import Arrival, Trace, read_trace


def read_recorded(path: str | Path) -> RecordedTrace:
    """See :func:`deepinfer_core.api.simulation.read_recorded`."""
    trace = read_trace(path)
    outputs = _outputs(trace)
    order = np.argsort(trace.steps_before, kind="stable").tolist()
    known = [i for i in order if trace.arrivals[i].id in outputs]
    header = trace.header
    return RecordedTrace(
        config=SimulationConfig(
            block_size=header.block_size,
            num_blocks=max(header.num_blocks.values(), default=4096) + 1,  # recorded without the null block
            max_batch_tokens=header.max_batch_tokens,
            max_running=header.max_running,
        ),
        policy=header.policy,
        requests=tuple(_request(trace.arrivals[i], outputs) for i in known),
        steps_before=tuple(trace.steps_before[i] for i in known),
        steps=tuple(
            RecordedStep(
                start=s.time - s.seconds,
                seconds=s.seconds,
                tokens=s.tokens,
                prefill=s.prefill,
                requests=s.requests,
                output=s.output,
            )
            for s in trace.steps
        ),
        unfinished=len(order) - len(known),
    )


def _outputs(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Tokens of each completion, of the requests all of whose completions ran to their end."""
    ended: dict[str, dict[int, int]] = {}
    for finish in trace.finishes:
        if finish.reason in ("stop", "length"):
            ended.setdefault(finish.id, {})[finish.child] = finish.output
    wanted = {arrival.id: arrival.n for arrival in trace.arrivals}
    return {
        request: tuple(lengths[child] for child in sorted(lengths))
        for request, lengths in ended.items()
        if len(lengths) == wanted.get(request) and min(lengths.values()) > 0
    }


def _request(arrival: Arrival, outputs: dict[str, tuple[int, ...]]) -> SimulatedRequest:
    return SimulatedRequest(
        id=arrival.id,
        arrival=arrival.time,
        prompt=arrival.prompt,
        outputs=outputs[arrival.id],
        max_tokens=arrival.max_tokens,
        blocks=arrival.blocks,
        tenant=arrival.tenant,
        priority=arrival.priority,
        deadline=arrival.deadline,
        ttft_target=arrival.ttft_target,
        tpot_target=arrival.tpot_target,
    )


class _AsRecorded:
    """No cost model: every step is given its recorded time."""

    def seconds(self, shape: StepShape) -> float:
        raise AssertionError(f"a step was not recorded: {shape}")

    def decode_seconds(self, rows: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        raise AssertionError("recorded steps are taken one by one")


def replay(trace: RecordedTrace, policy: Policy, on_result: Callable[[SimulatedResult], None]) -> list[RecordedStep]:
    """See :func:`deepinfer_core.api.simulation.replay`. Ends early where the simulator has nothing left to run."""
    if not trace.steps:
        raise ConfigError("the trace holds no step: record it to the end, with --record-trace")
    engine = SimulatedEngine(policy, trace.config, _AsRecorded(), on_result, stepwise=True)
    coming = list(zip(trace.requests, trace.steps_before, strict=True))[::-1]
    steps = []
    for number, recorded in enumerate(trace.steps):
        engine.now = recorded.start
        while coming and coming[-1][1] <= number:
            engine.add(coming.pop()[0])
        if not engine.unfinished:
            break
        shape = engine.step(seconds=recorded.seconds)
        assert engine.last_plan is not None
        steps.append(
            RecordedStep(
                start=recorded.start,
                seconds=recorded.seconds,
                tokens=shape.tokens,
                prefill=shape.prefill,
                requests=len(engine.last_plan.slots),
                output=shape.sampled,
            )
        )
    return steps
