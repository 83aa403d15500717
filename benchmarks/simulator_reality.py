"""The simulator against the engine it stands for: one load through the demo model, and through the simulator.

    python benchmarks/simulator_reality.py [--quick] [--json] [--wall] [--policy NAME] [--utilisation SHARE]

First the model's steps are profiled, then a Poisson load that keeps the engine about 65 % busy runs through the engine,
recorded, and the recorded arrivals through the simulator with the profiled table. Shown: TTFT, TPOT and throughput of
both, and the differences. With the recorded times of its steps in place of the table, the simulator must make the same
steps: that is compared as well, with the times that follow from them.

Times are processor time on one thread, so that other work on a shared machine is left out; gaps in which no request is
there are skipped. ``--wall`` measures with the machine's clock instead, which needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from common import finish, machine, print_table
from deepinfer_scheduler.cost_table import CostTable, fit
from deepinfer_scheduler.figures import Collector, Targets
from deepinfer_scheduler.run import run

from deepinfer_core import SamplingParams
from deepinfer_core.api.simulation import (
    RecordedTrace,
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    named_policy,
    profile_steps,
    read_recorded,
    replay,
)
from deepinfer_core.config import load_config
from deepinfer_core.engine.logs import configure_logging
from deepinfer_core.engine.open_engine import open_engine
from deepinfer_core.engine.outputs import RequestMetrics

SETTINGS: dict[str, Any] = {
    "model.path": "demo",
    "accelerator": "cpu",
    "kv_cache.num_blocks": 2049,
    "scheduling.max_batch_tokens": 256,
    "scheduling.max_running": 16,
    "model.max_model_len": 2048,
    "logging.progress": False,
    "logging.level": "warning",
}
CONFIG = SimulationConfig(num_blocks=2049, max_batch_tokens=256, max_running=16, max_model_len=2048)
Item = tuple[float, int, int]
"""Arrival, prompt and output length."""


class Clock:
    """Seconds of ``base``, plus those that were skipped."""

    def __init__(self, base: Callable[[], float]) -> None:
        self.base = base
        self.skipped = 0.0

    def __call__(self) -> float:
        return self.base() + self.skipped

    def wait_until(self, moment: float) -> None:
        if self.base is time.monotonic:
            time.sleep(max(0.0, moment - self()))
        else:
            self.skipped += max(0.0, moment - self())


def load(count: int, rate: float) -> list[Item]:
    random = np.random.default_rng(7)
    times = random.exponential(1 / rate, count).cumsum().tolist()
    prompts = np.clip(np.exp(random.normal(np.log(120), 0.8, count)), 4, 700).astype(int).tolist()
    outputs = np.clip(np.exp(random.normal(np.log(40), 0.6, count)), 4, 200).astype(int).tolist()
    return list(zip(times, prompts, outputs, strict=True))


def rate_for(share: float, table: CostTable, policy: str, count: int) -> float:
    """The highest rate at which the simulated engine is at most ``share`` of the time in steps."""
    low, high = 0.01, 50.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        requests = [
            SimulatedRequest(id=str(i), arrival=at, prompt=p, outputs=(o,))
            for i, (at, p, o) in enumerate(load(count, middle))
        ]
        collector = Collector(Targets())
        totals = run([named_policy(policy)], CONFIG, table, requests, collector.add)
        busy = collector.figures(totals, 1)["utilisation"]
        low, high = (middle, high) if busy < share else (low, middle)
    return low


def run_engine(items: list[Item], policy: str, trace: Path, clock: Clock) -> dict[str, RequestMetrics]:
    """The load through the demo model, as a server would run it."""
    random = np.random.default_rng(0)
    config = load_config(overrides={**SETTINGS, "scheduling.policy": policy, "logging.trace_file": str(trace)})
    engine = open_engine(config, clock=clock)
    core = engine.core
    requests = []

    def add(name: str, arrival: float, prompt: int, output: int) -> None:
        ids = random.integers(300, 40_000, prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        requests.append(engine.intake.request(name, ids, params, now=arrival, stream=False))
        core.add(requests[-1:])

    for warm in (1, 20, 200):
        add(f"warm-{warm}", core.clock(), warm, 4)
        while core.has_unfinished:
            core.step()
    coming, begun = items[::-1], core.clock() + 0.5
    while coming or core.has_unfinished:
        while coming and core.clock() - begun >= coming[-1][0]:
            at, prompt, output = coming.pop()
            add(f"load-{len(requests)}", begun + at, prompt, output)
        if core.has_unfinished:
            core.step()
        elif coming:
            clock.wait_until(begun + coming[-1][0])
    engine.close()
    return {request.request_id: request.metrics for request in requests if request.request_id.startswith("load")}


def measured(metrics: list[RequestMetrics]) -> dict[str, float]:
    seconds = max(m.finished or 0.0 for m in metrics) - min(m.arrival for m in metrics)
    return {
        "mean_ttft_ms": float(np.mean([m.ttft for m in metrics])) * 1e3,
        "mean_tpot_ms": float(np.mean([m.tpot for m in metrics if m.tpot is not None])) * 1e3,
        "output_tokens_per_second": sum(m.output_tokens for m in metrics) / seconds,
    }


def simulated(recorded: RecordedTrace, table: CostTable, policy: str) -> dict[str, float]:
    requests = [r for r in recorded.requests if r.id.startswith("load-")]
    collector = Collector(Targets())
    totals = run([named_policy(policy)], CONFIG, table, requests, collector.add)
    figures = collector.figures(totals, 1)
    return {
        "mean_ttft_ms": figures["ttft_ms"]["mean"],
        "mean_tpot_ms": figures["tpot_ms"]["mean"],
        "output_tokens_per_second": figures["output_tokens_per_second"],
        "utilisation": figures["utilisation"],
    }


def replayed(recorded: RecordedTrace, policy: str, metrics: dict[str, RequestMetrics]) -> dict[str, Any]:
    """Steps that are the same, and the largest relative difference of a time, with the steps' own times."""
    results: dict[str, SimulatedResult] = {}
    steps = replay(recorded, named_policy(policy), lambda result: results.update({result.request.id: result}))
    same = sum(attrs.astuple(a) == attrs.astuple(b) for a, b in zip(steps, recorded.steps, strict=False))
    off = [
        abs(simulated / real - 1)
        for name, m in metrics.items()
        for simulated, real in ((results[name].ttft, m.ttft), (results[name].tpot, m.tpot))
        if simulated and real
    ]
    return {"recorded_steps": len(recorded.steps), "the_same": same, "largest_difference": max(off)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few requests, and one round of profiling on a small grid")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--wall", action="store_true", help="the machine's clock in place of processor time")
    parser.add_argument("--policy", default="fcfs", help="scheduling policy (default fcfs)")
    parser.add_argument("--utilisation", type=float, default=0.65, help="share of the time in steps (default 0.65)")
    parser.add_argument("--requests", type=int, help="how many (default 100, quick 12)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    configure_logging(load_config(overrides=SETTINGS).logging)
    count = options.requests or (12 if options.quick else 100)
    base = time.monotonic if options.wall else time.process_time
    profiled = {**SETTINGS, **({"model.max_model_len": 256} if options.quick else {})}
    table = fit(profile_steps(profiled, rounds=1 if options.quick else 2, progress=_show, clock=base))
    rate = rate_for(options.utilisation, table, options.policy, count)
    _show(f"{count} requests at {rate:.2f}/s")
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place) / "trace.jsonl"
        metrics = run_engine(load(count, rate), options.policy, trace, Clock(base))
        recorded = read_recorded(trace)
    engine, simulator = measured(list(metrics.values())), simulated(recorded, table, options.policy)
    result: dict[str, Any] = {
        "machine": machine(),
        "quick": options.quick,
        "clock": "wall" if options.wall else "processor",
        "policy": options.policy,
        "requests": count,
        "rate": rate,
        "table": dict(table.facts),
        "engine": engine,
        "simulator": simulator,
        "difference": {name: simulator[name] / value - 1 for name, value in engine.items()},
        "replay": replayed(recorded, options.policy, metrics),
    }
    print(file=sys.stderr)
    print_table(
        ("", "engine", "simulator", "difference"),
        [(name, value, simulator[name], f"{result['difference'][name]:+.1%}") for name, value in engine.items()],
    )
    print(f"utilisation {simulator['utilisation']:.0%}; the table is off by {table.facts['median_error']:.1%} (median)")
    again = result["replay"]
    print(
        f"with recorded step times: {again['the_same']} of {again['recorded_steps']} steps are the same, "
        f"times within {again['largest_difference']:.2%}"
    )
    finish(result, options.json)


def _show(line: str) -> None:
    print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
