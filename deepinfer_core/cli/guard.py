"""Errors at the edge of the program: one line on standard error and an exit code, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from deepinfer_core.api import DeepInferError

from .streams import discard_output, prepare_streams

MISTAKE = 2
INTERRUPTED = 130
READER_GONE = 1


def run(command: click.Command, arguments: Sequence[str] | None) -> int:
    """Run ``command``; see :func:`deepinfer_core.cli.main` for the exit codes."""
    try:
        prepare_streams()
        code = command.main(args=arguments, prog_name="deepinfer", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "deepinfer"
        return _fail(f"{error.format_message().rstrip('.')} (see '{where} --help')")
    except click.ClickException as error:
        return _fail(error.format_message())
    except DeepInferError as error:
        return _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return READER_GONE
    except OSError as error:
        discard_output()
        where = "cannot write or read" if error.filename is None else f"{error.filename}"
        return _fail(f"{where}: {error.strerror or error}")
    return code if isinstance(code, int) else 0


def one_line(text: str) -> str:
    """``text`` with its lines joined by ``"; "``, after a line that ends with a colon by a space."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()).replace(":; ", ": ")


def _fail(text: str) -> int:
    click.echo(f"error: {one_line(text)}", err=True)
    return MISTAKE
