"""``deepinfer idle-report``: a benchmark's timeline in numbers."""

from __future__ import annotations

import json
from typing import Any

import attrs
import click

from deepinfer_core.api import ConfigError
from deepinfer_scheduler.idle import IdleReport, Waiting, read_events, waiting_reports
from deepinfer_scheduler.idle import idle_report as report_of

_MEANING = {
    "plan": "the host planned the next step",
    "launch": "the host gave it to the device",
    "wait": "the host had not yet noticed that the step was over",
    "commit": "the host applied the step's result",
    "outside the loop": "requests were there, and the host did something else",
    "no requests": "nothing was there to do",
}


@click.command("idle-report")
@click.argument("timeline", metavar="FILE")
@click.option("--requests", type=click.IntRange(min=0), default=5, show_default=True, help="Longest waits to show.")
@click.option("--request", "wanted", metavar="ID", help="Show why this request waited.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object in place of tables.")
def idle_report(timeline: str, requests: int, wanted: str | None, as_json: bool) -> int:
    """Where the device idled between steps, by cause, and what requests waited for.

    deepinfer bench --model demo --quick --timeline run.json && deepinfer idle-report run.json
    """
    events = read_events(timeline)
    report, waits = report_of(events), waiting_reports(events)
    if wanted is not None:
        waits = [waiting for waiting in waits if waiting.request == wanted]
        if not waits:
            raise ConfigError(f"--request {wanted}: there is no such request in {timeline}")
    if as_json:
        data: dict[str, Any] = {**attrs.asdict(report), "waiting": [attrs.asdict(waiting) for waiting in waits]}
        click.echo(json.dumps(data))
    else:
        _print(report, waits if wanted is not None else waits[:requests])
    return 0


def _print(report: IdleReport, waits: list[Waiting]) -> None:
    idle = report.total - report.busy
    click.echo(
        f"{report.steps} steps in {report.total:.3f} s; the device was idle for {idle / report.total:.1%} of it:"
    )
    for cause, seconds in report.idle.items():
        per_step = seconds / report.steps * 1e6
        click.echo(f"  {seconds / report.total:>6.1%}  {per_step:>8.0f} us/step  {cause:<16}  {_MEANING[cause]}")
    for waiting in waits:
        click.echo(f"request {waiting.request} waited {waiting.seconds:.3f} s")
        for reason, seconds in sorted(waiting.reasons.items(), key=lambda item: -item[1]):
            click.echo(f"  {seconds:>8.3f} s  for {reason}")
