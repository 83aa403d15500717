"""The ``deepinfer`` program. Commands import what they need when they run, so ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``deepinfer`` and return its exit code.

    Args:
        arguments: command line without the program's name; None takes the process's.

    Returns:
        0 for success, 1 when a request failed or the reader of the output went away, 2 for a mistake in the command
        line, the configuration or the checkpoint, or a file that cannot be written, 130 after Ctrl-C.
    """
    try:
        from .guard import run
        from .program import program
    except KeyboardInterrupt:  # so early that there is nothing to end
        return 130

    return run(program, arguments)
