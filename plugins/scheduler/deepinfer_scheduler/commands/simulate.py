"""``deepinfer simulate``: policies side by side on one load, without a model."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import (
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
)
from deepinfer_core.conformance.policy import PolicyFactory, policy_factory
from deepinfer_scheduler.cost_table import DEFAULT, CostTable, read_table
from deepinfer_scheduler.figures import Collector, Targets
from deepinfer_scheduler.plot import check_plot, draw
from deepinfer_scheduler.run import ROUTERS, Router, run
from deepinfer_scheduler.table import print_table
from deepinfer_scheduler.traces.files import Source, open_trace
from deepinfer_scheduler.traces.synthetic import KINDS, Load, synthetic

_COUNT = click.IntRange(min=1)
_LIMITS = ("block_size", "num_blocks", "max_batch_tokens", "max_running")


def _numbers(_: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        numbers = [0.0]
    if not all(0 < number < float("inf") for number in numbers):
        raise click.BadParameter(f"{value!r}: expected numbers above 0, separated by commas", param=parameter)
    return numbers


@click.command()
@click.option("--policy", default="fcfs", show_default=True, help="Policies, or module:Class, separated by commas.")
@click.option("--trace", metavar="FILE", help="Recorded trace, Mooncake JSON lines, Azure or BurstGPT CSV.")
@click.option("--synthetic", "kind", type=click.Choice(KINDS), help="Generate the load in place of a trace.")
@click.option("--requests", type=_COUNT, help="Generated requests, or the first ones of a trace.  [default: 1000, all]")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Generated requests per second.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of a generated load.")
@click.option("--load", default="1", callback=_numbers, help="Factors on the rate of arrivals, separated by commas.")
@click.option("--hash-tokens", type=_COUNT, default=512, show_default=True, help="Tokens of one of hash_ids.")
@click.option("--cost-table", metavar="FILE", help="What steps cost, from `profile-steps`.  [default: a small model]")
@click.option("--replicas", type=_COUNT, default=1, show_default=True, help="Engines behind a router.")
@click.option("--router", type=click.Choice(ROUTERS), default=ROUTERS[0], show_default=True, help="Who gets a request.")
@click.option("--block-size", type=_COUNT, help="Tokens of a cache block.  [default: the trace's, or 16]")
@click.option("--num-blocks", type=click.IntRange(min=2), help="Cache blocks.  [default: the trace's, or 4097]")
@click.option("--max-batch-tokens", type=_COUNT, help="Tokens of a step.  [default: the trace's, or 2048]")
@click.option("--max-running", type=_COUNT, help="Requests at once.  [default: the trace's, or 256]")
@click.option(
    "--ttft-target-ms", type=float, default=2000.0, show_default=True, help="For goodput, and requests without."
)
@click.option(
    "--tpot-target-ms", type=float, default=100.0, show_default=True, help="For goodput, and requests without."
)
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="A setting, as plugins.scheduler.patience_s=5.")
@click.option("--plot", metavar="FILE", help="Draw throughput against speed per user; needs matplotlib.")
@click.option(
    "--json", "json_file", metavar="FILE", is_flag=False, flag_value="-", help="Write a JSON object; '-' prints it."
)
def simulate(
    policy: str,
    trace: str | None,
    kind: str | None,
    requests: int | None,
    rate: float,
    seed: int,
    load: list[float],
    hash_tokens: int,
    cost_table: str | None,
    replicas: int,
    router: Router,
    ttft_target_ms: float,
    tpot_target_ms: float,
    sets: tuple[str, ...],
    plot: str | None,
    json_file: str | None,
    **limits: int | None,
) -> int:
    """Compare scheduling policies on a trace: the engine's planner, cache and policies under a virtual clock.

    deepinfer simulate --policy fcfs,latency --synthetic chat --requests 2000 --rate 2 --load 0.5,1
    """
    if (trace is None) == (kind is None):
        raise click.UsageError("give --trace FILE or --synthetic KIND, one of them")
    for option, number in (
        ("--rate", rate),
        ("--ttft-target-ms", ttft_target_ms),
        ("--tpot-target-ms", tpot_target_ms),
    ):
        if not 0 < number < float("inf"):
            raise click.UsageError(f"{option} {number:g}: expected a number above 0")
    if plot is not None:
        check_plot(plot)
    if json_file not in (None, "-") and not Path(str(json_file)).absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_file}: its folder does not exist")
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip()))
    settings = _settings(sets)
    policies = _policies(names, settings)
    if kind is not None:
        source = synthetic(kind, Load(requests=requests or 1000, rate=rate, seed=seed))
    else:
        source = open_trace(str(trace), id_tokens=hash_tokens)
    config = _config(source, limits)
    table = read_table(cost_table or DEFAULT)
    targets = Targets(ttft=ttft_target_ms / 1e3, tpot=tpot_target_ms / 1e3)
    rows = []
    for name in names:
        for factor in load:
            coming = _coming(source, config, factor, requests)
            collector = Collector(targets)
            bar = _Progress(f"{name}, load {factor:g}", collector)
            started = time.process_time()
            totals = run([policies[name]() for _ in range(replicas)], config, table, coming, bar.add, router)
            bar.close()
            row = {"policy": name, "load": factor, **collector.figures(totals, replicas)}
            rows.append({**row, "cpu_seconds": time.process_time() - started})
    _write(rows, source, config, table, replicas, plot, json_file)
    return 0


def _policies(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, PolicyFactory]:
    """By name, each made once already: a wrong name or setting is an error before anything runs."""
    sys.path.insert(0, "")  # where module:Class is looked for
    made = {}
    for name in names:
        try:
            made[name] = policy_factory(name, settings)
            made[name]()
        except (ImportError, AttributeError, TypeError) as error:
            raise click.UsageError(f"--policy {name}: {error}") from None
    return made


def _settings(sets: Sequence[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in sets]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise click.UsageError(f"--set {key}: expected KEY=VALUE")
    return {key: _literal(value) for key, _, value in pairs}


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _config(source: Source, limits: Mapping[str, int | None]) -> SimulationConfig:
    given: dict[str, Any] = {name: limits[name] for name in _LIMITS if limits[name] is not None}
    return attrs.evolve(source.limits or SimulationConfig(), **given)


def _coming(source: Source, config: SimulationConfig, factor: float, most: int | None) -> Iterator[SimulatedRequest]:
    for number, request in enumerate(source.requests(config)):
        if number == most:
            return
        if factor == 1:
            yield request
            continue
        arrival = request.arrival / factor
        left = None if request.deadline is None else request.deadline - request.arrival + arrival
        yield attrs.evolve(request, arrival=arrival, deadline=left)


class _Progress:
    """A line on standard error, once a second."""

    def __init__(self, name: str, collector: Collector) -> None:
        self.name, self.collector = name, collector
        self._shown = time.monotonic()
        self._any = False

    def add(self, result: SimulatedResult) -> None:
        self.collector.add(result)
        if self.collector.requests % 256 == 0 and time.monotonic() - self._shown > 1:
            self._shown, self._any = time.monotonic(), True
            done, clock = self.collector.requests, self.collector.end
            click.echo(f"\r{self.name}: {done} requests, {clock:.0f} s simulated ", nl=False, err=True)

    def close(self) -> None:
        if self._any:
            click.echo(err=True)


def _write(
    rows: list[dict[str, Any]],
    source: Source,
    config: SimulationConfig,
    table: CostTable,
    replicas: int,
    plot: str | None,
    json_file: str | None,
) -> None:
    print_table(rows, f"{source.name} on {replicas} x {table.facts.get('model', 'an unnamed model')}")
    if plot is not None:
        draw(rows, plot, source.name)
    report = {
        "load": source.name,
        "engine": attrs.asdict(config),
        "replicas": replicas,
        "costs": dict(table.facts),
        "runs": rows,
    }
    text = json.dumps(report, allow_nan=False)
    if json_file == "-":
        click.echo(text)
    elif json_file is not None:
        try:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {json_file}: {error.strerror}") from None
