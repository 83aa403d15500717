"""``deepinfer conformance``: run the kit against a backend and say what it found."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deepinfer_core.conformance.case import TIERS

if TYPE_CHECKING:
    from deepinfer_core.conformance import Result


@click.command()
@click.argument("backend", required=False)
@click.option(
    "--tier",
    type=click.Choice(TIERS),
    default="boots",
    show_default=True,
    help="How much is asked; each holds the last.",
)
@click.option(
    "--family", "families", metavar="NAME", multiple=True, help="Only this family or operator; may be repeated."
)
@click.option("--gaps", metavar="FILE", help="Known gaps (conformance_gaps.toml): cases that may fail, with reasons.")
@click.option(
    "--provider",
    "providers",
    metavar="PLUGIN:NAME",
    multiple=True,
    help="Ask this provider wherever it takes a request, whatever its score; may be repeated.",
)
@click.option(
    "--demand",
    "demands",
    metavar="CAP",
    multiple=True,
    help="Ask providers that have this cap, such as batch_invariant; may be repeated.",
)
@click.option("--policy", metavar="MODULE:CLASS", help="Also a scheduling policy's invariants; needs no BACKEND.")
@click.option("--report", metavar="FILE", help="Write all results as JSON.")
@click.option(
    "--plugin", "plugins", metavar="FILE", multiple=True, help="A plugin that is not installed; may be repeated."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that ask at the same time; for a device that compiles its kernels.",
)
@click.option("--list", "list_only", is_flag=True, help="Print the cases that would be asked, and stop.")
@click.option("--verbose", "-v", is_flag=True, help="A line for every case, not only for those that need a look.")
def conformance(
    backend: str | None,
    tier: str,
    families: Sequence[str],
    gaps: str | None,
    report: str | None,
    plugins: Sequence[str],
    providers: Sequence[str],
    demands: Sequence[str],
    policy: str | None,
    jobs: int,
    list_only: bool,
    verbose: bool,
) -> int:
    """Ask BACKEND whether it does what the contracts say.

    BACKEND is what users write after --accelerator; 'reference' means the reference operators on the host. Prints a
    capability table for the backend's README. Exit code 0: nothing failed; 1: something did; 2: a mistake in the
    command line or the gaps file.
    """
    from deepinfer_core.conformance import read_gaps, run

    if backend is None and policy is None and not list_only:
        raise click.UsageError("name a BACKEND, or a policy with --policy MODULE:CLASS")
    if policy is not None:
        sys.path.insert(0, os.getcwd())  # where an author's module is, as for python -m
    known = read_gaps(gaps) if gaps else ()
    if list_only:
        return _list(tier, families)
    if report is not None and not Path(report).parent.is_dir():
        raise click.UsageError(f"--report {report}: there is no folder {Path(report).parent}")
    found = run(
        backend,
        tier=tier,  # type: ignore[arg-type]
        families=families,
        gaps=known,
        plugins=plugins,
        providers=providers,
        demands=demands,
        policy=policy,
        progress=_Progress(verbose),
        jobs=jobs,
    )
    for result in found.results:
        if result.family == "policy" and result.outcome == "failed":
            click.echo(f"FAILED {result.case}: {result.message}", err=True)
    click.echo(found.table())
    if report is not None:  # last: the table is not lost if this fails
        Path(report).write_text(found.to_json(), encoding="utf-8")
    return 0 if found.passed else 1


def _list(tier: str, families: Sequence[str]) -> int:
    from deepinfer_core.conformance.kit import select

    for case in select(tier, families):  # type: ignore[arg-type]
        click.echo(case.id)
    return 0


class _Progress:
    """A line on standard error for each case that needs a look, and a counter on a terminal."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._terminal = sys.stderr.isatty()

    def __call__(self, result: Result, done: int, total: int) -> None:
        if self._verbose or result.outcome == "failed":
            click.echo(f"{result.outcome.upper()} {result.case}: {result.message}", err=True)
        elif self._terminal:
            click.echo(f"\r{done}/{total}", err=True, nl=done == total)
