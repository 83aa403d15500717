"""Made-up views of an engine, of any size, for asking a scheduling policy."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_core.api import RequestArrays, RequestView, SystemView

Array = np.ndarray[Any, Any]
TENANTS = ("", "a", "b", "c")


def random_view(
    random: np.random.Generator, *, waiting: int, running: int, max_running: int = 256, now: float | None = None
) -> SystemView:
    """A view that an engine could show: arrival times rise, nothing is longer than it may be, arrays are read-only.

    Times, lengths, priorities, deadlines (past ones too) and targets vary, and are missing for some or for all.
    """
    clock = float(random.uniform(50, 5000)) if now is None else now
    total = int(random.integers(max(2, running), 4 * running + 64))
    measured = int(random.integers(0, 6))
    tokens = np.sort(random.choice(np.arange(1, 2048), measured, replace=False)).astype(np.float64)
    return SystemView(
        now=clock,
        step=int(random.integers(0, 10**6)),
        waiting=_requests(random, waiting, clock, started=False),
        running=_requests(random, running, clock, started=True),
        free_blocks=int(random.integers(0, total + 1)),
        total_blocks=total,
        block_size=16,
        max_batch_tokens=int(random.choice([1, 16, 256, 8192])),
        max_running=max(running, max_running),
        tenants=list(TENANTS),
        step_cost=_fixed(np.stack([tokens, np.sort(random.uniform(1e-3, 1, measured))], axis=1)),
    )


def random_request(random: np.random.Generator, view: SystemView) -> RequestView:
    """A request that arrives now."""
    some = _requests(random, 1, view.now, started=False)
    times = [float(value[0]) for value in (some.deadline, some.ttft_target, some.tpot_target)]
    deadline, ttft, tpot = (value if np.isfinite(value) else None for value in times)
    return RequestView(
        request_id="new",
        arrival=view.now,
        prompt_len=int(some.prompt[0]),
        max_tokens=int(some.max_tokens[0]),
        priority=int(some.priority[0]),
        tenant=TENANTS[int(some.tenant[0])],
        deadline=deadline,
        ttft_target=ttft,
        tpot_target=tpot,
    )


def _requests(random: np.random.Generator, count: int, now: float, *, started: bool) -> RequestArrays:
    prompt = random.integers(1, 4000, count)
    max_tokens = random.integers(1, 1000, count)
    # Of those that run, some are within their prompt; of those that wait, some were preempted.
    share = random.random(count) * (random.random(count) < (0.7 if started else 0.1))
    output = (share * max_tokens).astype(np.int64)
    whole = prompt + output
    computed = (
        np.where(output > 0, whole - 1, (random.random(count) * prompt).astype(np.int64)) if started else 0 * whole
    )
    return RequestArrays(
        ids=[f"{'r' if started else 'w'}{i}" for i in range(count)],
        arrival=_fixed(np.sort(now - random.exponential(random.choice([0.1, 10.0, 1000.0]), count))),
        prompt=_fixed(prompt),
        cached=_fixed((random.random(count) * (random.random(count) < 0.5) * prompt).astype(np.int64)),
        computed=_fixed(computed),
        output=_fixed(output),
        max_tokens=_fixed(max_tokens),
        priority=_fixed(random.integers(-3, 4, count)),
        tenant=_fixed(random.integers(0, len(TENANTS), count)),
        deadline=_some(random, now + random.normal(0, 60, count)),
        ttft_target=_some(random, random.uniform(0.05, 10, count)),
        tpot_target=_some(random, random.uniform(0.001, 1, count)),
        blocks=_fixed(-(-computed // 16)),
    )


def _some(random: np.random.Generator, values: Array) -> Array:
    """``values``, with infinity for those that have none: all, some or nobody."""
    return _fixed(np.where(random.random(len(values)) < random.choice([0.0, 0.5, 1.0]), values, np.inf))


def _fixed(array: Array) -> Array:
    array.flags.writeable = False
    return array
