"""The three standard streams as the program needs them: there, and able to carry what is written."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

import click

from deepinfer_core.api import InvalidRequestError


def prepare_streams() -> None:
    """Make every stream usable, whatever this process was started with.

    A closed standard error is replaced by the null device, so that no file opened later becomes it. What an output's
    encoding lacks is written as an escape (``\\u2603``) rather than lost.

    Raises:
        click.ClickException: standard output is closed, so that all results would be lost.
    """
    while (taken := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(taken)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise click.ClickException("standard output is closed: redirect it to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Let what standard output still holds go nowhere: the interpreter writes it once more at exit."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # no file
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def read_input(stream: TextIO | None) -> str:
    """All of standard input; nothing if it is closed.

    Raises:
        InvalidRequestError: it cannot be read, or is not in the encoding of this locale.
    """
    if stream is None:
        return ""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="strict")  # the C locale would let other bytes through as surrogates
    try:
        return stream.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"standard input: byte {error.start} is not {error.encoding.upper()} text; convert it with iconv"
        ) from None
    except OSError as error:
        raise InvalidRequestError(f"standard input: {error.strerror}") from None
