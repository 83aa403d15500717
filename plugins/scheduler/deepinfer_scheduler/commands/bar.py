"""A line on standard error that says how far a long command is."""

from __future__ import annotations

import sys
from typing import TextIO

WIDTH = 24


class Bar:
    """On a terminal a bar that is drawn again and again; elsewhere a line for each tenth of the work."""

    def __init__(self, to: TextIO | None = None) -> None:
        self._to = to or sys.stderr
        self._terminal = self._to.isatty()
        self._share = 0.0
        self._text = ""
        self._tenths = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._to.write("\n")
        self._to.flush()

    def show(self, text: str) -> None:
        """What is done now."""
        self._text = text
        self._draw()

    def advance(self, share: float) -> None:
        """Of the work so much is done, from 0 to 1."""
        self._share = min(max(share, 0.0), 1.0)
        self._draw()

    def _draw(self) -> None:
        if self._terminal:
            full = round(WIDTH * self._share)
            bar = "#" * full + "-" * (WIDTH - full)
            self._to.write(f"\r[{bar}] {self._share:4.0%} {self._text:<70.70}")
        elif int(10 * self._share) > self._tenths:
            self._tenths = int(10 * self._share)
            self._to.write(f"{self._share:4.0%} {self._text}\n")
        self._to.flush()
