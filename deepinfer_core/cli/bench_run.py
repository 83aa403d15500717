"""Sends a load through an engine and keeps what can be seen of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from deepinfer_core.engine.assemble import Engine
from deepinfer_core.engine.request import Request
from deepinfer_core.engine.sampling_params import SamplingParams
from deepinfer_core.engine.step_timing import StepTiming

from .bench_load import LoadItem

LONGEST_NAP = 0.05
WARM_UP_TOKENS = (16, 4)


@attrs.frozen(kw_only=True)
class Run:
    """One benchmark run. ``start`` and ``end`` are seconds on the engine's clock."""

    requests: Sequence[Request]
    steps: Sequence[StepTiming]
    start: float
    end: float


def warm_up(engine: Engine, requests: int) -> None:
    """Let lazy initialisation happen before anything is measured."""
    longest = engine.intake.limits.max_model_len
    prompt = [0] * max(1, min(WARM_UP_TOKENS[0], longest - 1))
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS[1], ignore_eos=True)
    load = [LoadItem(prompt={"prompt_token_ids": prompt}, params=params)] * requests
    _drive(engine, load, None, "warm-up", lambda finished, tokens: None, engine.core.clock())


def run_load(
    engine: Engine, load: Sequence[LoadItem], *, concurrency: int | None, progress: Callable[[int, int], None]
) -> Run:
    """Send every item when it is due and wait for all of them.

    Args:
        concurrency: most requests in the engine at once; further ones wait outside, and their time begins when they
            are let in. None: no limit, and a request's time begins when it was due, however busy the engine was.
        progress: called with requests finished and tokens made since the last call.
    """
    steps: list[StepTiming] = []
    engine.core.observer.watchers.append(steps.append)
    start = engine.core.clock()
    try:
        requests = _drive(engine, load, concurrency, "bench", progress, start)
    finally:
        engine.core.observer.watchers.remove(steps.append)
    return Run(requests=requests, steps=steps, start=start, end=engine.core.clock())


def _drive(
    engine: Engine,
    load: Sequence[LoadItem],
    concurrency: int | None,
    name: str,
    progress: Callable[[int, int], None],
    start: float,
) -> list[Request]:
    core = engine.core
    coming = deque(sorted(load, key=lambda item: item.at))
    requests: list[Request] = []
    while coming or core.has_unfinished:
        now = core.clock()
        while coming and start + coming[0].at <= now and (concurrency is None or len(core.requests) < concurrency):
            item = coming.popleft()
            arrival = start + item.at if concurrency is None else now
            request_id = f"{name}-{len(requests)}"
            request = engine.intake.request(request_id, item.prompt, item.params, now=arrival, stream=False)
            requests.append(request)
            progress(len(core.add([request]).finished), 0)
        if core.has_unfinished:
            committed = core.step()
            progress(len(committed.finished), committed.output_tokens)
        elif coming:
            time.sleep(min(LONGEST_NAP, max(0.0, start + coming[0].at - core.clock())))
    return requests
