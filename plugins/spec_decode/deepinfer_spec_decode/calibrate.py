"""``deepinfer calibrate-drafter``: fit the temperatures of a drafter's confidence on held-out prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from deepinfer_core.api import CommandHost, ConfigError

from .calibration import FILE_NAME
from .needs import drafter_path
from .sts import Records, fit

RULES = ("exact", "rejection")


@click.command(name="calibrate-drafter")
@click.option("--model", required=True, help="Checkpoint of the target.")
@click.option("--method", default="dspark", show_default=True, help="Drafter, as in speculation.method.")
@click.option("--drafter", default="", help="Checkpoint of the draft module; empty: it is in the target's.")
@click.option(
    "--prompts",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Held-out prompts, one a line.",
)
@click.option("--draft-tokens", default=5, show_default=True, help="Drafts verified at once.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens generated for a prompt.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the requests.")
@click.option("--out", default="", help="Where to write; empty: beside the drafter's checkpoint.")
@click.option("--plot", default="", help="Also draw the reliability diagram to this file (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="A JSON object as the last line.")
@click.pass_obj
def calibrate(
    host: CommandHost,
    model: str,
    method: str,
    drafter: str,
    file: str,
    draft_tokens: int,
    max_tokens: int,
    temperature: float,
    out: str,
    plot: str,
    as_json: bool,
) -> None:
    """Fit confidence temperatures, position by position, for exact verification and for rejection.

    Half of the drafts fit, the others show the error before and after. The file is read when an engine starts, unless
    speculation.confidence_temperature is set.
    """
    prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(prompts) < 2:
        raise ConfigError(f"--prompts {file}: expected at least 2 prompts, one a line")
    results: dict[str, Any] = {}
    shown: dict[str, tuple[Records, tuple[float, ...]]] = {}
    path = Path(out) if out else Path(drafter_path(drafter) or model) / FILE_NAME
    if not path.parent.is_dir():
        raise ConfigError(f"--out: {model!r} is no directory to put {FILE_NAME} in: say where")
    for rule in RULES:
        click.echo(f"{rule}: {len(prompts)} prompts of up to {max_tokens} tokens", err=True)
        with tempfile.TemporaryDirectory() as directory:
            record = Path(directory) / "drafts.jsonl"
            settings = {
                "speculation.method": method,
                "speculation.verify": rule,
                "speculation.schedule": "fixed",
                "speculation.max_draft_tokens": draft_tokens,
                "plugins.spec_decode.drafter": drafter,
                "plugins.spec_decode.calibration": "off",
                "plugins.spec_decode.record_file": str(record),
            }
            with host.open_llm(model, settings) as llm:
                params = [
                    host.sampling_params(
                        temperature=temperature, max_tokens=max_tokens, seed=i if rule == "exact" else None
                    )
                    for i in range(len(prompts))
                ]
                llm.generate(prompts, params)
            records = read_records(record, rule)
        if len(records.accepted) == 0:
            raise ConfigError(f"drafter {method!r} gave no confidence to calibrate under verify={rule!r}")
        half = np.arange(len(records.accepted)) % 2 == 0
        temperatures = fit(records.part(half))
        check = records.part(~half)
        shown[rule] = (check, temperatures)
        results[rule] = {
            "temperatures": [round(t, 4) for t in temperatures],
            "drafts": len(records.accepted),
            "accepted_length": round(1 + float(records.accepted.mean()), 4),
            "error_before": round(check.error((1.0,)), 4),
            "error_after": round(check.error(temperatures), 4),
        }
        click.echo(
            f"{rule}: {len(records.accepted)} drafts, {results[rule]['accepted_length']} tokens a round, calibration "
            f"error {results[rule]['error_before']:.2%} before, {results[rule]['error_after']:.2%} after"
        )
    write(path, method, results)
    click.echo(f"written: {path}")
    if plot:
        from .reliability import draw

        draw(Path(plot), shown)
        click.echo(f"drawn: {plot}")
    if as_json:
        click.echo(json.dumps({"method": method, "path": str(path), "rules": results}))


def read_records(path: Path, rule: str) -> Records:
    """The drafts that this rule judged."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [entry for entry in map(json.loads, lines) if entry["rule"] == rule]
    return Records.of([entry["confidence"] for entry in found], [entry["accepted"] for entry in found])


def write(path: Path, method: str, results: dict[str, Any]) -> None:
    """Put a drafter's temperatures beside those of others.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path.write_text(json.dumps({**known, method: results}, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written ({error}): give another place with --out") from error
