"""How fast the simulator is, and how much memory it takes: requests with opaque block keys on one core.

    python benchmarks/simulator_speed.py [--quick] [--json] [--requests N] [--policy NAME]

Prompts of 361 tokens on average that begin with one of a thousand shared prefixes of 64 to 256 tokens, answers of 179
tokens, blocks of 16; the load leaves no queue growing. Prints requests per second of processor time, peak memory, and
how many steps were planned and how many advanced in stretches. The extrapolation to a million requests assumes the
same rate; run with ``--requests 1000000`` to see.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import attrs
from common import finish, machine
from deepinfer_scheduler.figures import Collector, Targets
from deepinfer_scheduler.run import run
from deepinfer_scheduler.traces.synthetic import Load, synthetic
from policies import ACCELERATOR

from deepinfer_core.api.simulation import SimulatedRequest, SimulatedResult, SimulationConfig, named_policy

CONFIG = SimulationConfig(block_size=16, num_blocks=32_001, max_batch_tokens=2048, max_running=256)
PREFIXES = 1000


def keyed(requests: Iterator[SimulatedRequest]) -> Iterator[SimulatedRequest]:
    """With block keys: a shared prefix of 4 to 16 blocks, then the request's own."""
    for number, request in enumerate(requests):
        prefix = number * 7919 % PREFIXES
        shared = 4 + prefix % 13
        first, own = prefix << 8, (PREFIXES + number) << 16
        count = request.prompt // CONFIG.block_size
        blocks = (*range(first, first + min(shared, count)), *range(own, own + max(0, count - shared)))
        yield attrs.evolve(request, blocks=blocks)


def measure(policy: str, count: int, rate: float) -> dict[str, Any]:
    collector = Collector(Targets())
    shown = time.monotonic()

    def on_result(result: SimulatedResult) -> None:
        nonlocal shown
        collector.add(result)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{collector.requests} requests, {time.process_time() - started:.0f} s", file=sys.stderr, flush=True)

    source = synthetic("chat", Load(requests=count, rate=rate))
    started = time.process_time()
    totals = run([named_policy(policy)], CONFIG, ACCELERATOR, keyed(source.requests(CONFIG)), on_result)
    seconds = time.process_time() - started
    figures = collector.figures(totals, 1)
    return {
        "policy": policy,
        "requests": count,
        "cpu_seconds": seconds,
        "requests_per_second": count / seconds,
        "million_minutes": 1e6 / count * seconds / 60,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "steps": totals.steps,
        "utilisation": figures["utilisation"],
        "cache_hit_rate": figures["cache_hit_rate"],
        "preemptions": figures["preemptions"],
        "mean_ttft_ms": figures["ttft_ms"]["mean"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,000 requests")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--requests", type=int, help="how many (default 50,000)")
    parser.add_argument("--rate", type=float, default=20.0, help="per simulated second (default 20)")
    parser.add_argument("--policy", default="fcfs", help="scheduling policy (default fcfs)")
    options = parser.parse_args()
    count = options.requests or (2000 if options.quick else 50_000)
    found = measure(options.policy, count, options.rate)
    for name, value in found.items():
        print(f"{name:>20}  {value if not isinstance(value, float) else f'{value:.4g}'}")
    finish({"machine": machine(), "quick": options.quick, **found}, options.json)


if __name__ == "__main__":
    main()
