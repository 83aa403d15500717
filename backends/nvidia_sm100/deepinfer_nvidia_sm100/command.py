"""``deepinfer tune``: which kernel multiplies few rows fastest on this GPU, for the matrices of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

import click

from deepinfer_core.api import ConfigError, DeviceError

Shapes = dict[str, tuple[int, int, str]]


def shapes_of(plan: Any) -> tuple[Shapes, Shapes]:
    """``"NxK"`` -> rows, columns and result dtype of every 16-bit matrix in what ``explain --json`` wrote: of plain
    products, and of those that end in a gate.

    Raises:
        ConfigError: it is something else, or holds no such matrix.
    """
    choices = plan["plan"].get("choices") if isinstance(plan, dict) and isinstance(plan.get("plan"), dict) else None
    if not isinstance(choices, list):
        raise ConfigError("PLAN: expected what this writes: deepinfer explain --model MODEL --json")
    found: Shapes = {}
    gated: Shapes = {}
    for choice in choices:
        request = choice["request"]
        if request.get("dtype") not in ("bfloat16", "float16"):
            continue
        if choice["op"] == "gemm.linear":
            out, inner = int(request["out_features"]), int(request["in_features"])
            found[f"{out}x{inner}"] = (out, inner, str(request["out_dtype"]))
        elif choice["op"] == "fused.gated_linear":
            out, inner = 2 * int(request["width"]), int(request["in_features"])
            gated[f"{out}x{inner}"] = (out, inner, str(request["dtype"]))
    if not found:
        raise ConfigError("PLAN: no linear layer in 16 bits; add to deepinfer explain: --set model.dtype=bfloat16")
    return found, gated


@click.command()
@click.argument("plan", type=click.File("r"))
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tuned.json"),
    show_default=True,
    help="File to write, or to add to.",
)
def tune(plan: IO[str], out: Path) -> None:
    """Measure which kernel multiplies few rows fastest on this GPU.

    PLAN is the output of `deepinfer explain --model MODEL --json`, or - for standard input. Takes about half a minute.
    Use the result with --set plugins.nvidia_sm100.table=FILE.
    """
    try:
        found = json.load(plan)
    except ValueError as error:
        raise ConfigError(f"PLAN: no JSON: {error}") from error
    shapes, gated = shapes_of(found)
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("tune: torch sees no GPU on this machine; check: nvidia-smi")
    from .tuning import ROWS, Tuner, entries, save

    tuner = Tuner()
    click.echo(f"compiling for {len(shapes) + len(gated)} shapes", err=True)
    for section, some in (("linear", shapes), ("gated_linear", gated)):
        ends_in_gate = section == "gated_linear"
        tuner.compile(some.values(), gated=ends_in_gate)
        for name, shape in some.items():
            measured = [tuner.best(shape, rows, ends_in_gate) for rows in ROWS]
            save(out, {name: entries(measured)}, section)
            gain = [m["cublas_us"] / m["us"] for m in measured]
            click.echo(f"{section} {name}: {min(gain):.2f} to {max(gain):.2f} times as fast as cuBLAS", err=True)
    click.echo(f"written to {out}; use: --set plugins.nvidia_sm100.table={out}")
