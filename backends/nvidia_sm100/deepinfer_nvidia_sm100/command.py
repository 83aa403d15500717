"""``deepinfer tune``: which kernels multiply fastest on this GPU, for the matrices of a plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from deepinfer_core.api import ConfigError, DeviceError

from . import table_file, tune_sections
from .tune_sections import Shapes, TunedFile, tune_all

if TYPE_CHECKING:
    from .fp8_tables import Kind

    Fp8Shapes = dict[tuple[Kind, str], tuple[int, int, str]]

IN_16_BITS = "add to deepinfer explain: --set model.dtype=bfloat16"
SECTIONS = {
    "linear": IN_16_BITS,
    "gated_linear": IN_16_BITS,
    "fixed_linear": "add to deepinfer explain: --set features.batch_invariant=true --set model.dtype=bfloat16",
    "fp8": "explain a checkpoint whose weights are in FP8 with a scale for 128 columns",
    "between_attention": IN_16_BITS,
}
"""What is measured, by sections of the table, and how a plan comes to have it: ``fixed_linear`` with gates, ``fp8``
either kind of rows."""


EXPECTED = "expected what this writes: deepinfer explain --model MODEL --json"


def choices_of(plan: Any) -> list[Any]:
    """What ``explain --json`` chose for every operator.

    Raises:
        ConfigError: it is something else.
    """
    choices = plan["plan"].get("choices") if isinstance(plan, dict) and isinstance(plan.get("plan"), dict) else None
    if not isinstance(choices, list):
        raise ConfigError(f"PLAN: {EXPECTED}")
    for number, choice in enumerate(choices):
        known = isinstance(choice, dict) and isinstance(choice.get("op"), str)
        if not known or not isinstance(choice.get("request"), dict):
            raise ConfigError(f"PLAN: plan.choices[{number}] has no op or no request: {EXPECTED}")
    return choices


def check_out(path: Path) -> None:
    """Measuring takes minutes, so what would keep its results from being written is said before.

    Raises:
        ConfigError: the file cannot be written, or holds something that no shapes can be added to.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {path.parent}; make it, or give another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: cannot be written; give another file")
    if path.exists():
        try:
            table_file.read(str(path))
        except table_file.BadTable as error:
            raise ConfigError(
                f"--out {path}: no shapes can be added to what it holds: {error}; or give another file"
            ) from error


def shapes_of(plan: Any, *, invariant: bool = False) -> tuple[Shapes, Shapes]:
    """``"NxK"`` -> rows, columns and result dtype of every 16-bit matrix in what ``explain --json`` wrote: of plain
    products, and of those that end in a gate. ``invariant``: those with the demand ``batch_invariant``, and no others.
    """
    found: Shapes = {}
    gated: Shapes = {}
    for choice in choices_of(plan):
        request = choice["request"]
        if ("batch_invariant" in request.get("demands", ())) != invariant:
            continue
        if request.get("dtype") not in ("bfloat16", "float16"):
            continue
        if str(request.get("weight_dtype", "")).startswith(("fp8:", "fp4:")):
            continue
        if choice["op"] == "gemm.linear":
            out, inner = int(request["out_features"]), int(request["in_features"])
            found[f"{out}x{inner}"] = (out, inner, str(request["out_dtype"]))
        elif choice["op"] == "fused.gated_linear":
            out, inner = 2 * int(request["width"]), int(request["in_features"])
            gated[f"{out}x{inner}"] = (out, inner, str(request["dtype"]))
        elif choice["op"] == "fused.between_attention":
            hidden, attended, width, merged = (int(request[n]) for n in ("hidden", "attended", "width", "merged"))
            for out, inner in ((hidden, attended), (2 * width, hidden), (hidden, width), (merged, hidden)):
                found[f"{out}x{inner}"] = (out, inner, str(request["dtype"]))
            gated[f"{2 * width}x{hidden}"] = (2 * width, hidden, str(request["dtype"]))
    return found, gated


def fp8_shapes_of(plan: Any) -> Fp8Shapes:
    """``plain`` or ``rounded`` and ``"NxK"`` -> rows, columns and result dtype of every matrix in FP8."""
    found: Fp8Shapes = {}
    for choice in choices_of(plan):
        request = choice["request"]
        if choice["op"] != "gemm.linear" or request.get("dtype") not in ("bfloat16", "float16"):
            continue
        stored = str(request.get("weight_dtype", ""))
        if stored.startswith("fp8:e4m3:") and stored.endswith("x128"):
            out, inner = int(request["out_features"]), int(request["in_features"])
            kind: Kind = "rounded" if request.get("activations") else "plain"
            found[kind, f"{out}x{inner}"] = (out, inner, str(request["out_dtype"]))
    return found


def sections_of(plan: Any, only: Sequence[str]) -> dict[str, Callable[[TunedFile], None]]:
    """What measures each section that the plan has; of those asked for, if any were.

    Raises:
        ConfigError: one that was asked for is not in the plan, or nothing is.
    """
    shapes, gated = shapes_of(plan)
    fixed, fixed_gated = shapes_of(plan, invariant=True)
    fp8_shapes = fp8_shapes_of(plan)
    choices = choices_of(plan)
    between = any(
        choice["op"] == "fused.between_attention" and choice["request"].get("dtype") in ("bfloat16", "float16")
        for choice in choices
    )
    found: dict[str, Callable[[TunedFile], None]] = {}
    if shapes:
        found["linear"] = partial(tune_sections.tune_linear, "linear", shapes)
    if gated:
        found["gated_linear"] = partial(tune_sections.tune_linear, "gated_linear", gated)
    if fixed or fixed_gated:
        found["fixed_linear"] = partial(tune_sections.tune_fixed, fixed, fixed_gated)
    if fp8_shapes:
        found["fp8"] = partial(tune_sections.tune_fp8, fp8_shapes)
    if between:
        found["between_attention"] = partial(tune_sections.tune_between, choices, "between_attention" in only)
    for name in only:
        if name not in found:
            there = f"has {', '.join(found)}" if found else "has nothing that can be tuned"
            raise ConfigError(f"--only {name}: PLAN has no such layer, it {there}; for {name} {SECTIONS[name]}")
    if not found:
        raise ConfigError(f"PLAN: no linear layer in 16 bits or FP8; {IN_16_BITS}")
    return {name: measure for name, measure in found.items() if not only or name in only}


@click.command()
@click.argument("plan", type=click.File("r"))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tuned.json"),
    show_default=True,
    help="File to write, or to add to.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(SECTIONS)),
    help="Measure this and nothing else of the plan. May be given several times.",
)
def tune(plan: IO[str], out: Path, only: tuple[str, ...]) -> int:
    """Measure which kernel multiplies fastest on this GPU: few rows by 16-bit weights, any number of rows by FP8 ones,
    and a layer's products from one attention to the next, in one recorded step.

    PLAN is the output of `deepinfer explain --model MODEL --json`, or - for standard input. Takes about ten seconds a
    shape, and a minute for one of a plan with features.batch_invariant.
    Use the result with --set plugins.nvidia_sm100.table=FILE.
    Exit code 1: a section could not be measured; the others are in the file.
    """
    try:
        found = json.load(plan)
    except ValueError as error:
        raise ConfigError(f"PLAN: no JSON: {error}") from error
    try:
        sections = sections_of(found, only)
    except KeyError as error:
        raise ConfigError(f"PLAN: a request of plan.choices has no {error}: {EXPECTED}") from error
    check_out(out)
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("tune: torch sees no GPU on this machine; check: nvidia-smi")
    tuned = TunedFile(out)
    failed = tune_all(sections, tuned)
    if tuned.written:
        click.echo(f"written to {out}: {', '.join(tuned.written)}; use: --set plugins.nvidia_sm100.table={out}")
    for name, reason in failed.items():
        click.echo(f"failed: {name}: {reason}; try it again: deepinfer tune PLAN --out {out} --only {name}", err=True)
    return 1 if failed else 0
