"""Figures of several runs as a table for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 200
_TIMES = (("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"), ("queue_ms", "queue ms"))
_PLAIN = (
    ("output_tokens_per_second", "tokens/s", "{:.1f}"),
    ("tokens_per_second_per_user", "per user", "{:.1f}"),
    ("goodput_share", "in target", "{:.1%}"),
    ("cache_hit_rate", "cache hits", "{:.1%}"),
    ("preemptions", "preempted", "{}"),
    ("fairness", "fairness", "{:.3f}"),
    ("refused", "refused", "{}"),
)


def print_table(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """One line for each run; times as mean / median / 99th percentile."""
    table = Table(
        title=title,
        caption="times: mean / p50 / p99",
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    for words in ("load", *(words for _, words in _TIMES), *(words for _, words, _ in _PLAIN)):
        table.add_column(words, justify="right", no_wrap=True)
    for row in rows:
        times = [_spread(row[key]) for key, _ in _TIMES]
        plain = ["-" if row[key] is None else form.format(row[key]) for key, _, form in _PLAIN]
        table.add_row(row["policy"], f"{row['load']:g}", *times, *plain)
    Console(width=WIDTH).print(table)  # a narrower window wraps lines, which keeps every figure


def _spread(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else " / ".join(f"{values[name]:.0f}" for name in ("mean", "p50", "p99"))
