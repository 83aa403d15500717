"""Launching a kernel, or only compiling it for the same arguments, as tuning and warmup want it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def starter(kernel: Any, grid: tuple[int, ...], *, compile_only: bool) -> Callable[..., Any]:
    """What takes a kernel's arguments and launches it over ``grid``; ``compile_only``: compiles it."""
    return functools.partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
