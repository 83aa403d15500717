"""``deepinfer calibrate-drafter``: fit the temperatures of a drafter's confidence on held-out prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from deepinfer_core.api import CommandHost, ConfigError

from .calibration import FILE_NAME, GREEDY
from .needs import drafter_path, shipped
from .reliability import check_plot
from .sts import PLAIN, Array, Records, fit

RULES = ("exact", "rejection", GREEDY)


@click.command(name="calibrate-drafter")
@click.option("--model", required=True, help="Checkpoint of the target.")
@click.option("--method", default="dspark", show_default=True, help="Drafter, as in speculation.method.")
@click.option(
    "--drafter",
    default="",
    help="Checkpoint of the draft module, or of the smaller model of draft_model; empty: it is in the target's.",
)
@click.option(
    "--prompts",
    "file",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Held-out prompts, one a line; in a file called *.jsonl each line is a JSON string.",
)
@click.option("--draft-tokens", type=click.IntRange(1), default=5, show_default=True, help="Drafts verified at once.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens generated for a prompt."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the requests that are drawn; greedy ones are calibrated as well.",
)
@click.option(
    "--bias/--no-bias",
    default=True,
    show_default=True,
    help="Fit a bias beside each temperature; without, the paper's temperatures alone.",
)
@click.option(
    "--margin/--no-margin",
    default=True,
    show_default=True,
    help="Beside the bias also weigh how clearly a draft won, where the drafter says so.",
)
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
    bias: bool,
    margin: bool,
    out: str,
    plot: str,
    as_json: bool,
) -> None:
    """Fit how confidences are scaled, by position: under exact verification, under rejection, and of greedy requests.

    All drafts fit. The error shown is that of each half of the prompts scaled as fits the other half. The file is read
    when an engine starts, unless speculation.confidence_temperature is set.
    """
    prompts = read_prompts(Path(file))
    if len(prompts) < 2:
        raise ConfigError(f"--prompts {file}: expected at least 2 prompts, one a line")
    results: dict[str, Any] = {}
    shown: dict[str, tuple[Records, Array]] = {}
    path = place(out, drafter, model)
    if plot:
        check_plot(Path(plot))
    for rule in RULES:
        click.echo(f"{rule}: {len(prompts)} prompts of up to {max_tokens} tokens", err=True)
        verify = "rejection" if rule == "rejection" else "exact"
        with tempfile.TemporaryDirectory() as directory:
            record = Path(directory) / "drafts.jsonl"
            settings = {
                "speculation.method": method,
                "speculation.verify": verify,
                "speculation.schedule": "fixed",
                "speculation.max_draft_tokens": draft_tokens,
                f"plugins.spec_decode.{'draft_model' if method == 'draft_model' else 'drafter'}": drafter,
                "plugins.spec_decode.calibration": "off",
                "plugins.spec_decode.record_file": str(record),
            }
            with host.open_llm(model, settings) as llm:
                params = [
                    host.sampling_params(
                        temperature=0.0 if rule == GREEDY else temperature,
                        max_tokens=max_tokens,
                        seed=i if verify == "exact" else None,
                    )
                    for i in range(len(prompts))
                ]
                llm.generate(prompts, params)
            records = read_records(record, verify)
        if len(records.accepted) == 0:
            raise ConfigError(
                f"--method {method}: it gave no confidence to calibrate under verify={verify!r}; take one that says "
                "how sure it is of a draft, as dspark does; if it is one, more prompts or --max-tokens"
            )
        wanted = {"bias": bias, "margin": margin and bias}
        scaling, after = fit(records, **wanted), records.crossed(**wanted)
        shown[rule] = (records, after)
        results[rule] = {
            "temperatures": [round(t, 4) for t in scaling.temperatures],
            "biases": [round(b, 4) for b in scaling.biases],
            "margins": [[round(weight, 4) for weight in pair] for pair in scaling.margins],
            "drafts": len(records.accepted),
            "accepted_length": round(1 + float(records.accepted.mean()), 4),
            "error_before": round(records.error(records.survival(PLAIN)), 4),
            "error_after": round(records.error(after), 4),
            "standard_error": round(records.standard_error(after), 4),
            "least_error": round(records.least_error(after), 4),
        }
        found = results[rule]
        click.echo(
            f"{rule}: {found['drafts']} drafts, {found['accepted_length']} tokens a round, calibration error "
            f"{found['error_before']:.2%} before, {found['error_after']:.2%} after (+- {found['standard_error']:.2%}); "
            f"{found['least_error']:.2%} by chance alone"
        )
    write(path, method, results)
    click.echo(f"written: {path}")
    if plot:
        from .reliability import draw

        draw(Path(plot), shown)
        click.echo(f"drawn: {plot}")
    if as_json:
        click.echo(json.dumps({"method": method, "path": str(path), "rules": results}))


def place(out: str, drafter: str, model: str) -> Path:
    """The file to write: the one named, or beside the checkpoint that has the drafter.

    Raises:
        ConfigError: there is no such folder.
    """
    if out:
        path = Path(out)
        if path.is_dir():
            raise ConfigError(f"--out {out}: is a folder: name a file in it, as {path / FILE_NAME}")
        if not path.parent.is_dir():
            raise ConfigError(f"--out {out}: its folder does not exist")
        return path
    beside = Path(drafter_path(drafter) or model)
    if not beside.is_dir():
        option, name = ("--drafter", drafter) if drafter else ("--model", model)
        known = f", or one that comes with the plugin ({', '.join(shipped())})" if drafter else ""
        raise ConfigError(
            f"{option} {name}: is no directory to put {FILE_NAME} in: name one{known}, or say with --out where to write"
        )
    return beside / FILE_NAME


def read_prompts(path: Path) -> list[str]:
    """One a line, or JSON strings of which one may have many lines.

    Raises:
        ConfigError: the file is no text, or a line of a .jsonl file no JSON string.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts {path}: not UTF-8 text") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    try:
        prompts = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ConfigError(f"--prompts {path}: not JSON lines ({error})") from error
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ConfigError(f"--prompts {path}: {json.dumps(prompt):.200}: expected a JSON string in each line")
    return prompts


def read_records(path: Path, rule: str) -> Records:
    """The drafts that this rule judged."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [entry for entry in map(json.loads, lines) if entry["rule"] == rule]
    confidences, accepted, requests = (
        [entry[name] for entry in found] for name in ("confidence", "accepted", "request")
    )
    margins = [entry["margin"] for entry in found if "margin" in entry]
    return Records.of(confidences, accepted, requests, margins if len(margins) == len(found) else None)


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
