"""``deepinfer bench``: latency, throughput and where the time goes, for a synthetic load or a recorded one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deepinfer_core.api import ConfigError

from .options import EngineOptions, run_options
from .output import plain

if TYPE_CHECKING:
    from deepinfer_core.engine.assemble import Engine

    from .bench_load import LoadItem
    from .bench_ops import OpTimer
    from .bench_run import Run

REQUEST_FAILED = 1
DEFAULTS: Mapping[str, int] = {"num_prompts": 64, "input_len": 128, "output_len": 64}
QUICK: Mapping[str, int] = {"num_prompts": 8, "input_len": 32, "output_len": 16}
_LENGTH = click.IntRange(min=1)


@click.command()
@click.option("--num-prompts", type=_LENGTH, help=f"Requests.  [default: {DEFAULTS['num_prompts']}]")
@click.option("--input-len", type=_LENGTH, help=f"Tokens of a prompt.  [default: {DEFAULTS['input_len']}]")
@click.option("--output-len", type=_LENGTH, help=f"Tokens of an answer.  [default: {DEFAULTS['output_len']}]")
@click.option("--request-rate", type=float, help="Requests per second, Poisson.  [default: all at once]")
@click.option("--concurrency", type=_LENGTH, help="Most requests at once.  [default: no limit]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--trace", metavar="FILE", help="Replay a recorded trace in place of a synthetic load.")
@click.option("--time-scale", type=float, help="Factor on the trace's times; 0 sends all at once.  [default: 1]")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests before the run.")
@click.option("--quick", is_flag=True, help="A small load, unless lengths are given.")
@click.option(
    "--json", "json_file", metavar="FILE", is_flag=False, flag_value="-",
    help="Write a JSON object; '-', or nothing, prints it as the last line.",
)  # fmt: skip
@click.option("--plot", metavar="FILE", help="Draw the run (.png, .svg, .pdf); needs deepinfer-core[plot].")
@click.option("--ops", is_flag=True, help="A table of time by operator; measuring makes the run slower.")
@click.option("--timeline", metavar="FILE", help="Write a Chrome trace, which Perfetto opens.")
@run_options
def bench(
    options: EngineOptions,
    trace: str | None,
    time_scale: float | None,
    warmup: int,
    json_file: str | None,
    plot: str | None,
    ops: bool,
    timeline: str | None,
    **load: Any,
) -> int:
    """Measure a model: latency, throughput, and where the time of a step goes.

    deepinfer bench --model demo --quick
    """
    _check(trace, time_scale, load, {"--json": json_file, "--plot": plot, "--timeline": timeline})
    config = options.load()
    if config.model.path is None:
        raise ConfigError("no model: give --model PATH, or --model demo for the small one that is packaged")
    if plot is not None:
        from .bench_plot import check_plot

        check_plot(plot)
    from deepinfer_core.engine.open_engine import open_engine

    from .bench_ops import OpTimer

    timer = OpTimer() if ops else None
    engine = open_engine(config, wrap_op=None if timer is None else timer.wrap)
    try:
        items = _load(engine, trace, time_scale, load)
        run = _measure(engine, items, load["concurrency"], warmup, timer)
        report = _report(engine, run, trace, load, timer)
    finally:
        engine.close()
    _write(report, run, json_file, plot, timeline)
    return REQUEST_FAILED if report["failed"] else 0


def _check(trace: str | None, time_scale: float | None, load: dict[str, Any], files: Mapping[str, str | None]) -> None:
    """Refuse what cannot be meant, before anything is loaded; fills in the lengths that were not given."""
    rate, quick = load["request_rate"], load.pop("quick")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise click.UsageError(f"--request-rate {rate}: expected a number above 0")
    if time_scale is not None and not (math.isfinite(time_scale) and time_scale >= 0):
        raise click.UsageError(f"--time-scale {time_scale}: expected a number, 0 or above")
    if trace is None and time_scale is not None:
        raise click.UsageError("--time-scale is for --trace; --request-rate paces a synthetic load")
    for name, default in (QUICK if quick else DEFAULTS).items():
        if load[name] is None:
            load[name] = default
        elif trace is not None:
            raise click.UsageError(f"--trace brings its own requests; leave out --{name.replace('_', '-')}")
    if trace is not None and rate is not None:
        raise click.UsageError("--trace brings its own times; leave out --request-rate, or use --time-scale")
    for option, file in files.items():
        if file not in (None, "-") and not Path(str(file)).absolute().parent.is_dir():
            raise click.UsageError(f"{option} {file}: its folder does not exist")


def _load(engine: Engine, trace: str | None, time_scale: float | None, load: Mapping[str, Any]) -> list[LoadItem]:
    from deepinfer_core.engine.trace_file import read_trace

    from .bench_load import synthetic_load, trace_load

    limits = engine.intake.limits
    longest = min(limits.max_model_len, limits.capacity)
    if trace is not None:
        return trace_load(
            read_trace(trace),
            time_scale=1.0 if time_scale is None else time_scale,
            seed=load["seed"],
            vocab_size=limits.vocab_size,
            max_model_len=longest,
        )
    shape = {name: load[name] for name in (*DEFAULTS, "request_rate", "seed")}
    return synthetic_load(**shape, vocab_size=limits.vocab_size, max_model_len=longest)


def _measure(engine: Engine, items: list[LoadItem], concurrency: int | None, warmup: int, timer: OpTimer | None) -> Run:
    from deepinfer_core.engine.progress import prompts_bar

    from .bench_run import run_load, warm_up

    warm_up(engine, warmup)
    if timer is not None:
        timer.reset()
    with prompts_bar(len(items), enabled=engine.planned.config.logging.progress) as progress:
        return run_load(engine, items, concurrency=concurrency, progress=progress)


def _report(
    engine: Engine, run: Run, trace: str | None, load: Mapping[str, Any], timer: OpTimer | None
) -> dict[str, Any]:
    from deepinfer_core import __version__

    from .bench_report import figures, op_rows

    plan, planned = engine.planned.plan, engine.planned
    report = {
        "model": planned.spec.architecture,
        "accelerator": plan.accelerator,
        "dtype": planned.spec.dtype,
        "version": __version__,
        "facts": dict(plan.facts),
        "load": {"trace": trace, "concurrency": load["concurrency"], "seed": load["seed"]}
        if trace is not None
        else dict(load),
        **figures(run),
    }
    if timer is not None:
        report["ops"] = op_rows(timer.rows(), sum(step.device_seconds for step in run.steps))
    return report


def _write(report: Mapping[str, Any], run: Run, json_file: str | None, plot: str | None, timeline: str | None) -> None:
    from .bench_report import print_figures, print_ops

    print_figures(report)
    if "ops" in report:
        print_ops(report["ops"])
    if plot is not None:
        from .bench_plot import draw

        draw(run, plot)
    if timeline is not None:
        from .bench_timeline import chrome_trace

        _save("--timeline", timeline, json.dumps(chrome_trace(run)))
    text = json.dumps(plain(report), allow_nan=False, ensure_ascii=False)
    if json_file == "-":
        click.echo(text)
    elif json_file is not None:
        _save("--json", json_file, text + "\n")


def _save(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}") from None
