"""``deepinfer profile-steps``: the cost table of a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import profile_steps as measure
from deepinfer_scheduler.cost_table import fit, write_table

from .bar import Bar


@click.command("profile-steps")
@click.option("--model", metavar="PATH", required=True, help="Checkpoint directory, GGUF file, or 'demo'.")
@click.option("--accelerator", metavar="NAME", help="Backend to run on; 'auto' takes the best one present.")
@click.option("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16.")
@click.option("--out", metavar="FILE", required=True, help="Cost table to write, for `simulate --cost-table`.")
@click.option("--rounds", type=click.IntRange(min=1), help="Times each point is measured.  [default: 3; --quick: 1]")
@click.option(
    "--seconds",
    type=click.IntRange(min=0),
    help="Time for it, loading and compiling apart; what would take longer is left out. 0: the whole grid.  "
    "[default: 45; --quick: 10]",
)
@click.option("--quick", is_flag=True, help="One round in a quarter of the time, to see that it runs.")
@click.option("--max-batch-tokens", type=click.IntRange(min=1), help="Largest step.  [default: the setting]")
@click.option("--max-running", type=click.IntRange(min=1), help="Most decode rows.  [default: the setting]")
@click.option("--max-model-len", type=click.IntRange(min=32), help="Longest context.  [default: the checkpoint's]")
@click.option("--num-blocks", type=click.IntRange(min=2), help="Cache blocks.  [default: as memory allows]")
@click.option("--processor-time", is_flag=True, help="Count processor time only, for a busy host.")
def profile_steps(
    model: str,
    accelerator: str | None,
    dtype: str | None,
    out: str,
    rounds: int | None,
    seconds: int | None,
    quick: bool,
    processor_time: bool,
    **limits: int | None,
) -> int:
    """Measure what steps cost over a grid of prompt rows, decode rows and contexts, and write the table. The grid goes
    as far as the engine's limits and --seconds allow, smallest loads first.

    deepinfer profile-steps --model demo --max-batch-tokens 256 --max-running 16 --out costs.json
    """
    settings: dict[str, Any] = {
        "model.path": model,
        "accelerator": accelerator,
        "model.dtype": dtype,
        "scheduling.max_batch_tokens": limits["max_batch_tokens"],
        "scheduling.max_running": limits["max_running"],
        "model.max_model_len": limits["max_model_len"],
        "kv_cache.num_blocks": limits["num_blocks"],
    }
    given = {key: value for key, value in settings.items() if value is not None}
    seconds = (10 if quick else 45) if seconds is None else seconds
    with _written(Path(out)), Bar() as bar:
        profile = measure(
            {**given, "logging.level": "warning"},
            rounds=rounds or (1 if quick else 3),
            progress=bar.show,
            clock=time.process_time if processor_time else time.monotonic,
            seconds=seconds or None,
            share=bar.advance,
        )
        table = fit(profile)
        write_table(table, out)
    facts = table.facts
    click.echo(
        f"{out}: {facts['steps']} steps, {facts['left_out']} of them left out as disturbed; "
        f"the table is off by {facts['median_error']:.1%} (median) and {facts['p90_error']:.1%} (90th percentile)"
    )
    if facts["points_left_out"]:
        points = facts["points"] + facts["points_left_out"]
        click.echo(
            f"{facts['points']} of {points} points were measured in {seconds} s, steps of up to "
            f"{table.rows[-1, 0]:.0f} rows; what is larger is extrapolated. All of them: --seconds 0"
        )
    return 0


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """That the file can be written is known before a minute of measuring; nothing new is left if that fails."""
    new = not out.exists()
    try:
        out.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    try:
        yield
    except BaseException:
        if new:
            out.unlink(missing_ok=True)
        raise
