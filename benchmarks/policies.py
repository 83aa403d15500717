"""All scheduling policies: what their planning costs, and what they do with three loads, in the simulator.

    python benchmarks/policies.py [--quick] [--json] [--plot FILE] [--only planner|loads|claims]

``planner``: processor time of one planned step with 256 requests running and 10,000 waiting, in which one ends and one
is admitted, so that the policy is asked anew every time. ``loads``: chat, agents with long shared contexts, and batch
beside interactive requests, each at several rates. ``claims``: the latency policy holds its target where first come,
first served breaks it; the fair one bounds the share of a tenant that floods the engine; the cache-aware one finds more
in a tight cache.

The loads run on costs that are invented for the purpose (``ACCELERATOR`` below), of no device in particular: what is
compared is policies, on equal terms.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from common import finish, machine, print_table
from deepinfer_scheduler.cost_table import CostTable
from deepinfer_scheduler.figures import Collector, Targets
from deepinfer_scheduler.plot import draw
from deepinfer_scheduler.plugin import deepinfer_scheduling
from deepinfer_scheduler.run import run
from deepinfer_scheduler.traces.synthetic import Load, synthetic

from deepinfer_core.api import Policy
from deepinfer_core.api.simulation import (
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    StepShape,
    named_policy,
)
from deepinfer_core.engine.simulated import SimulatedEngine

POLICIES = ("fcfs", *(info.name for info in deepinfer_scheduling()))
RUNNING, WAITING = 256, 10_000

ACCELERATOR = CostTable(
    rows=[[1, 0.008], [64, 0.009], [512, 0.02], [2048, 0.06], [8192, 0.24]],
    sampled=[[1, 0.0], [256, 0.002]],
    prefill_context=5e-10,
    decode_context=2e-8,
    facts={"model": "an invented accelerator"},
)
SERVER = SimulationConfig(block_size=64, num_blocks=8001, max_batch_tokens=2048, max_running=128)
"""Half a million cached tokens."""


# ---- planner


class _Free:
    def seconds(self, shape: StepShape) -> float:
        return 0.01

    def decode_seconds(self, rows: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        return np.full(steps, 0.01)


def planning(policy: Policy, steps: int) -> dict[str, float]:
    """Processor time of planning one step, milliseconds: mean, median, 99th percentile."""
    config = SimulationConfig(num_blocks=60_000, max_batch_tokens=8192, max_running=RUNNING)
    engine = SimulatedEngine(policy, config, _Free(), lambda result: None, stepwise=True)
    numbers = itertools.count()

    def arrive() -> None:
        n = next(numbers)
        # The first 256 end one after the other; from then on one ends in every step.
        output = n + 20 if n < RUNNING else RUNNING
        engine.add(
            SimulatedRequest(
                id=str(n), arrival=engine.now, prompt=30 + n * 7 % 400, outputs=(output,), blocks=(n % 50,),
                tenant=f"t{n % 20}", priority=n % 3, ttft_target=0.1 + n % 7, tpot_target=0.05 + n % 3,
                deadline=engine.now + n % 11,
            )
        )  # fmt: skip

    for _ in range(RUNNING):
        arrive()
    while len(engine.planner.waiting):
        engine.step()
    for _ in range(WAITING):
        arrive()
    taken: list[float] = []
    plan = engine.planner.plan

    def timed(*arguments: Any) -> Any:
        started = time.thread_time()
        planned = plan(*arguments)
        taken.append((time.thread_time() - started) * 1e3)
        return planned

    engine.planner.plan = timed  # type: ignore[method-assign]
    for _ in range(steps):
        while len(engine.planner.waiting) < WAITING:
            arrive()
        engine.step()
    kept = taken[steps // 5 :]
    median, p99 = np.percentile(kept, (50, 99)).tolist()
    return {"mean_ms": float(np.mean(kept)), "median_ms": median, "p99_ms": p99}


# ---- loads


LOADS: dict[str, tuple[Load, Load, tuple[float, ...], SimulationConfig]] = {
    # name: the load, the quick load, factors on its rate, the engine
    "chat": (Load(requests=1500, rate=20), Load(requests=300, rate=20), (0.5, 1.0, 2.0), SERVER),
    "agents": (Load(requests=300, rate=1.5), Load(requests=60, rate=1.5), (0.5, 1.0, 1.5), SERVER),
    "mixed": (Load(requests=1500, rate=12), Load(requests=300, rate=12), (0.5, 1.0, 2.0), SERVER),
}


def faster(requests: Iterable[SimulatedRequest], factor: float) -> Iterator[SimulatedRequest]:
    return (attrs.evolve(request, arrival=request.arrival / factor) for request in requests)


def simulate(policy: Policy, config: SimulationConfig, requests: Iterable[SimulatedRequest]) -> dict[str, Any]:
    collector = Collector(Targets())
    totals = run([policy], config, ACCELERATOR, requests, collector.add)
    return collector.figures(totals, 1)


def compare(name: str, quick: bool) -> list[dict[str, Any]]:
    whole, small, factors, config = LOADS[name]
    source = synthetic(name, small if quick else whole)
    return [
        {
            "load": factor,
            "policy": policy,
            **simulate(named_policy(policy), config, faster(source.requests(config), factor)),
        }
        for policy in POLICIES
        for factor in (factors[-2:-1] if quick else factors)
    ]


# ---- claims


def latency_claim(quick: bool) -> dict[str, Any]:
    """25 ms for each token, while documents come whose prompts fill whole steps."""
    target = 0.025
    source = synthetic("mixed", Load(requests=800 if quick else 3000, rate=22))
    found: dict[str, Any] = {"target_ms": target * 1e3}
    for name in ("fcfs", "latency"):
        requests = (attrs.evolve(r, tpot_target=target, ttft_target=2.0) for r in source.requests(SERVER))
        settings = {"plugins.scheduler.latency_tpot_target_ms": target * 1e3} if name == "latency" else None
        figures = simulate(named_policy(name, settings), SERVER, requests)
        found[name] = {
            "p99_tpot_ms": figures["tpot_ms"]["p99"],
            "mean_ttft_ms": figures["ttft_ms"]["mean"],
            "output_tokens_per_second": figures["output_tokens_per_second"],
        }
    found["holds"] = found["latency"]["p99_tpot_ms"] <= found["target_ms"] < found["fcfs"]["p99_tpot_ms"]
    return found


def fair_claim(quick: bool) -> dict[str, Any]:
    """Half of all requests come from one of five tenants, and twice as many come as can be served."""
    source = synthetic("chat", Load(requests=1500 if quick else 6000, rate=80))
    found: dict[str, Any] = {}
    for name in ("fcfs", "fair"):
        requests = [
            attrs.evolve(r, tenant="flood" if n % 2 else f"user{n // 2 % 4}")
            for n, r in enumerate(source.requests(SERVER))
        ]
        last = requests[-1].arrival
        served: Counter[str] = Counter()

        def count(result: SimulatedResult, served: Counter[str] = served, last: float = last) -> None:
            if last / 4 < result.finished <= last:  # everybody has requests waiting
                served[result.request.tenant] += result.request.prompt + 2 * result.output

        config = attrs.evolve(SERVER, max_running=32)
        run([named_policy(name)], config, ACCELERATOR, requests, count)
        found[name] = {"flood_share": served["flood"] / sum(served.values())}
    found["equal_share"] = 1 / 5
    found["holds"] = found["fair"]["flood_share"] < 0.25 < found["fcfs"]["flood_share"]
    return found


def cache_claim(quick: bool) -> dict[str, Any]:
    """Conversations whose contexts do not all fit the cache, with requests waiting."""
    config = attrs.evolve(SERVER, num_blocks=4001, max_running=8)
    source = synthetic("agents", Load(requests=250 if quick else 600, rate=2.5))
    found: dict[str, Any] = {}
    for name in ("fcfs", "cache_aware"):
        figures = simulate(named_policy(name), config, source.requests(config))
        found[name] = {"cache_hit_rate": figures["cache_hit_rate"], "mean_ttft_ms": figures["ttft_ms"]["mean"]}
    found["holds"] = found["cache_aware"]["cache_hit_rate"] > found["fcfs"]["cache_hit_rate"]
    return found


CLAIMS = {"latency": latency_claim, "fair": fair_claim, "cache_aware": cache_claim}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--plot", metavar="FILE", help="draw throughput against speed per user, a file for each load")
    parser.add_argument("--only", choices=("planner", "loads", "claims"), help="one part")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick}
    if options.only in (None, "planner"):
        steps = 60 if options.quick else 300
        result["planner"] = {name: planning(named_policy(name), steps) for name in POLICIES}
        rows = [[name, *values.values()] for name, values in result["planner"].items()]
        print_table((f"planning a step, {RUNNING} running, {WAITING} waiting", "mean ms", "median ms", "p99 ms"), rows)
    if options.only in (None, "loads"):
        result["loads"] = {name: compare(name, options.quick) for name in LOADS}
        for name, rows_of in result["loads"].items():
            show(name, rows_of)
            if options.plot is not None:
                place = Path(options.plot)
                draw(rows_of, str(place.with_name(f"{place.stem}_{name}{place.suffix}")), name)
    if options.only in (None, "claims"):
        result["claims"] = {name: claim(options.quick) for name, claim in CLAIMS.items()}
        for name, found in result["claims"].items():
            print(f"{name}: {found}")
    finish(result, options.json)


def show(name: str, rows: list[dict[str, Any]]) -> None:
    header = (name, "rate x", "TTFT ms", "p99", "TPOT ms", "p99", "tokens/s", "in target", "cache hits", "preempted")
    print_table(
        header,
        [
            (
                row["policy"],
                row["load"],
                row["ttft_ms"]["mean"],
                row["ttft_ms"]["p99"],
                row["tpot_ms"]["mean"],
                row["tpot_ms"]["p99"],
                row["output_tokens_per_second"],
                row["goodput_share"],
                row["cache_hit_rate"],
                row["preemptions"],
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
