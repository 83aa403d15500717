"""``deepinfer tune``: which kernel multiplies few rows fastest on this GPU, for the matrices of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from deepinfer_core.api import ConfigError, DeviceError

if TYPE_CHECKING:
    from .fp8_tables import Kind

    Fp8Shapes = dict[tuple[Kind, str], tuple[int, int, str]]

Shapes = dict[str, tuple[int, int, str]]
SECTIONS = ("linear", "gated_linear", "fixed_linear", "fp8", "between_attention")
"""What is measured, by sections of the table: ``fixed_linear`` with gates, ``fp8`` either kind of rows."""


def choices_of(plan: Any) -> list[Any]:
    """What ``explain --json`` chose for every operator.

    Raises:
        ConfigError: it is something else.
    """
    choices = plan["plan"].get("choices") if isinstance(plan, dict) and isinstance(plan.get("plan"), dict) else None
    if not isinstance(choices, list):
        raise ConfigError("PLAN: expected what this writes: deepinfer explain --model MODEL --json")
    return choices


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
    type=click.Choice(SECTIONS),
    help="Measure this and nothing else of the plan. May be given several times.",
)
def tune(plan: IO[str], out: Path, only: tuple[str, ...]) -> None:
    """Measure which kernel multiplies fastest on this GPU: few rows by 16-bit weights, any number of rows by FP8 ones,
    and a layer's products from one attention to the next, in one recorded step.

    PLAN is the output of `deepinfer explain --model MODEL --json`, or - for standard input. Takes about ten seconds a
    shape, and a minute for one of a plan with features.batch_invariant.
    Use the result with --set plugins.nvidia_sm100.table=FILE.
    """
    try:
        found = json.load(plan)
    except ValueError as error:
        raise ConfigError(f"PLAN: no JSON: {error}") from error
    shapes, gated = shapes_of(found)
    fixed, fixed_gated = shapes_of(found, invariant=True)
    fp8_shapes = fp8_shapes_of(found)
    if only:
        shapes, gated = (some if name in only else {} for name, some in (("linear", shapes), ("gated_linear", gated)))
        fixed, fixed_gated = (some if "fixed_linear" in only else {} for some in (fixed, fixed_gated))
        fp8_shapes = fp8_shapes if "fp8" in only else {}
    between = choices_of(found) if not only or "between_attention" in only else []
    between = between if any(choice["op"] == "fused.between_attention" for choice in between) else []
    if not shapes and not gated and not fixed and not fp8_shapes and not between:
        raise ConfigError("PLAN: no linear layer in 16 bits; add to deepinfer explain: --set model.dtype=bfloat16")
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("tune: torch sees no GPU on this machine; check: nvidia-smi")
    from .tuning import ROWS, Tuner, entries, save

    tuner = Tuner()
    count = len(shapes) + len(gated) + len(fixed) + len(fixed_gated) + len(fp8_shapes)
    click.echo(f"compiling for {count} shapes", err=True)
    for section, some in (("linear", shapes), ("gated_linear", gated)):
        ends_in_gate = section == "gated_linear"
        tuner.compile(some.values(), gated=ends_in_gate)
        for name, shape in some.items():
            measured = [tuner.best(shape, rows, ends_in_gate) for rows in ROWS]
            save(out, {name: entries(measured)}, section)
            gain = [m["cublas_us"] / m["us"] for m in measured]
            click.echo(f"{section} {name}: {min(gain):.2f} to {max(gain):.2f} times as fast as cuBLAS", err=True)
    if fixed or fixed_gated:
        _tune_fixed(fixed, fixed_gated, out)
    if fp8_shapes:
        _tune_fp8(fp8_shapes, out)
    if between:
        _tune_between(between, out)
    click.echo(f"written to {out}; use: --set plugins.nvidia_sm100.table={out}")


def _tune_fixed(shapes: Shapes, gated: Shapes, out: Path) -> None:
    from .fixed_tuning import FixedTuner
    from .tuning import ROWS, entries, save

    tuner = FixedTuner()
    tuner.compile_fixed((shapes | gated).values())
    tuner.compile(gated.values(), gated=True)
    for name, shape in (shapes | gated).items():
        found, splits, times = tuner.best_fixed(shape)
        save(out, {name: found}, "fixed_linear")
        spent = ", ".join(f"{rows} rows {us:.1f} us" for rows, us in times.items())
        click.echo(f"fixed_linear {name}: K in {splits} parts, {spent}", err=True)
        if name in gated and splits == 1:
            measured = [tuner.best(shape, rows, True, most_splits=1) for rows in ROWS]
            save(out, {name: entries(measured)}, "fixed_gated_linear")


def _tune_fp8(shapes: Fp8Shapes, out: Path) -> None:
    from .fp8_tuning import ROWS, Fp8Tuner, entries
    from .tuning import save

    tuner = Fp8Tuner()
    tuner.compile(shapes.values())
    for (kind, name), shape in shapes.items():
        measured = [tuner.best(kind, shape, rows) for rows in ROWS]
        save(out, {name: entries(measured)}, f"fp8_{kind}")
        rate = max(2e-6 * shape[0] * shape[1] * m["rows"] / m["us"] for m in measured)
        click.echo(f"{name} in FP8, rows {kind}: up to {rate:.0f} TFLOP/s", err=True)


def _tune_between(choices: list[Any], out: Path) -> None:
    from .between_tuning import ROWS, BetweenTuner, requests_of
    from .tuning import save

    requests = requests_of(choices)
    if requests is None:
        click.echo("between_attention: its products' shapes, or its attention, are not what can be tuned", err=True)
        return
    tuner = BetweenTuner(*requests)
    found = {}
    for rows in ROWS.values():
        found[rows], us, by_parts = tuner.best(rows)
        click.echo(f"between_attention, {rows} rows: {us:.1f} us a layer, by its parts {by_parts:.1f}", err=True)
    save(out, tuner.entries(found), "between_attention")
