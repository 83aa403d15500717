"""Progress bars on standard error, only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@contextmanager
def loading_bar(total: int, *, enabled: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each loaded tensor's name."""
    with _bar("Loading weights", total, enabled) as (progress, task):
        yield lambda _name: progress.advance(task)


@contextmanager
def prompts_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with prompts finished and tokens generated since the last call."""
    with _bar("Prompts", total, enabled and total > 1) as (progress, task):
        tokens = 0

        def advance(finished: int, output_tokens: int) -> None:
            nonlocal tokens
            tokens += output_tokens
            elapsed = progress.tasks[task].elapsed or 0.0
            rate = tokens / elapsed if elapsed else 0.0
            progress.update(task, advance=finished, note=f"{tokens} tokens, {rate:.1f}/s")

        yield advance


@contextmanager
def _bar(name: str, total: int, enabled: bool) -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    progress = Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
    )
    with progress:
        yield progress, progress.add_task(name, total=total, note="")
