"""Lets a policy schedule an engine that more requests come to than it can serve, and sees that everyone is served."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import structlog.testing

from deepinfer_core.api import Admit, Policy, RequestView, SchedulingEvent, SystemView, TokenSplit
from deepinfer_core.api.simulation import (
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    StepShape,
    open_simulation,
    run_simulation,
)

OVERLOAD, STEP = 1.1, 0.1
"""By how much too many requests come, and the seconds of a step."""
PROMPT, OUTPUT, RUNNING = 32, 4, 4

CONFIG = SimulationConfig(block_size=8, num_blocks=65, max_batch_tokens=64, max_running=RUNNING)


def progress_findings(make: Callable[[], Policy], patience: float) -> Iterator[tuple[str, str]]:
    """``(check, detail)`` of what went wrong.

    Args:
        patience: seconds that a request may wait beyond twice the longest wait under first come, first served.
            Requests keep coming for three times as long.
    """
    requests, fair = _load(3 * patience)
    waits, refused, failures, left = _waits(make(), requests)
    limit = patience + 2 * fair
    late = {request: wait for request, wait in waits.items() if wait > limit}
    if refused:
        yield "drops", f"refused: request {next(iter(refused))} had no deadline ({next(iter(refused.values()))})"
    if late:
        request = max(late, key=late.__getitem__)
        yield (
            "starves",
            f"waited: request {request} waited {late[request]:.0f} s; first come, first served took at most "
            f"{fair:.0f} s, and {limit:.0f} s are allowed",
        )
    if left:
        yield "starves", f"unfinished: {left} requests never ended"
    if failures:
        yield "raises", f"in the simulator: {failures} answers raised or made no sense"


@functools.cache
def _load(seconds: float) -> tuple[tuple[SimulatedRequest, ...], float]:
    """Requests, and the longest wait under first come, first served.

    Most requests are alike; every tenth is odd in one way that a policy may dislike.
    """
    rate = OVERLOAD * RUNNING / (OUTPUT * STEP)
    requests = []
    for number in range(int(rate * seconds)):
        odd = (number // 10) % 5 if number % 10 == 0 else -1
        requests.append(
            SimulatedRequest(
                id=str(number),
                arrival=number / rate,
                prompt=3 * PROMPT if odd == 0 else PROMPT,
                outputs=(2 * OUTPUT if odd == 1 else OUTPUT,),
                blocks=() if odd == 2 else (0, 1),
                priority=0 if odd == 3 else 1,
                tenant="many" if odd == 4 else ("a", "b", "c")[number % 3],
                ttft_target=None if odd >= 0 else 5.0,
                tpot_target=1.0,
            )
        )
    return tuple(requests), max(_waits(_Arrival(), requests)[0].values())


def _waits(policy: Policy, requests: Sequence[SimulatedRequest]) -> tuple[dict[str, float], dict[str, str], int, int]:
    """Seconds from arrival to the first step, reasons of refusals, failures of the policy, requests without an end."""
    waits: dict[str, float] = {}
    refused: dict[str, str] = {}

    def ended(result: SimulatedResult) -> None:
        if result.refused is not None:
            refused[result.request.id] = result.refused
        elif result.queue_time is not None:
            waits[result.request.id] = result.queue_time

    simulation = open_simulation(policy, CONFIG, _Constant(), ended)
    with structlog.testing.capture_logs():  # what the policy raised is reported as a finding
        run_simulation(simulation, requests)
    return waits, refused, simulation.totals().policy_failures, len(requests) - len(waits) - len(refused)


class _Constant:
    """Every step takes the same time."""

    def seconds(self, shape: StepShape) -> float:
        return STEP

    def decode_seconds(self, rows: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        return np.full(steps, STEP)


class _Arrival:
    """First come, first served, to compare with."""

    def admit(self, request: RequestView, view: SystemView) -> Admit:
        return Admit(True)

    def order(self, view: SystemView, k: int) -> range:
        return range(min(k, len(view.waiting.ids)))

    def split(self, view: SystemView) -> TokenSplit:
        return TokenSplit(view.max_batch_tokens, view.max_batch_tokens)

    def victims(self, view: SystemView, need_blocks: int) -> range:
        return range(len(view.running.ids) - 1, -1, -1)

    def on_event(self, event: SchedulingEvent) -> None:
        return None
