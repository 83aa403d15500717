"""``deepinfer doctor``: look at the installation, in child processes, and say what mends it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import attrs
import click

from .output import print_json, print_table

if TYPE_CHECKING:
    from deepinfer_core.doctor import Diagnosis


@click.command()
@click.option("--backend", metavar="NAME", help="Only this backend and its plugin; its device must be there.")
@click.option("--config", "config_file", metavar="FILE", help="TOML file with settings.")
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(min=0.1), help="For each child process; 60.")
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
def doctor(backend: str | None, config_file: str | None, timeout: float | None, strict: bool, as_json: bool) -> int:
    """Look at plugins, devices and settings, and say which command mends what is wrong.

    Each plugin is imported and asked in a process of its own; each backend with a device is started in another, on a
    model of one layer. Exit code 0: nothing is broken, 1: something is (with --strict, warnings count), 2: a mistake
    in the command line.
    """
    from deepinfer_core.doctor import examine
    from deepinfer_core.doctor.examine import TIMEOUT

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"looking at {text} ...", err=True)

    found = examine(backend=backend, timeout=timeout or TIMEOUT, file=config_file, progress=progress)
    failing = ("error", "warning") if strict else ("error",)
    code = 1 if found.worst() in failing else 0
    if as_json:
        print_json({"ok": code == 0, **attrs.asdict(found)})
    else:
        _print(found)
    return code


def _print(found: Diagnosis) -> None:
    print_table(
        "plugins",
        ("name", "distribution", "version", "import ms", "hooks ms", "hooks", "devices"),
        [
            (p.name, p.distribution, p.version, f"{p.import_seconds * 1000:.0f}", f"{p.hook_seconds * 1000:.0f}",
             p.hooks, "; ".join(p.devices))
            for p in found.plugins
        ],
    )  # fmt: skip
    print_table("backends", ("name", "a small plan"), found.backends)
    for finding in found.findings:
        whose = f"{finding.plugin}: " if finding.plugin else ""
        click.echo(f"\n{finding.severity}: {whose}{finding.check}: {' '.join(finding.text.split())}")
        click.echo(f"  fix: {finding.fix}")
    if not found.findings:
        click.echo("\nnothing is wrong")
