"""Which kernels were launched in the interpreter, and for which of them a GPU would compile one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, compute_cache_key


class NamedTarget:
    """As much of a Triton driver as sorting launches by the kernel they need asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def recorded_launches() -> Iterator[set[tuple[str, str]]]:
    """``(kernel, key)`` of everything launched inside: launches of one key share a compiled kernel."""
    seen: set[tuple[str, str]] = set()
    compiled: dict[Any, tuple[Any, dict[Any, Any]]] = {}
    run, active = InterpretedFunction.run, driver._active

    def watched(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if self.fn not in compiled:
            compiled[self.fn] = JITFunction(self.fn, **self.kwargs).create_binder()[-1], {}
        binder, keys = compiled[self.fn]
        _, specialization, options = binder(*arguments, **named, debug=False)
        seen.add((self.fn.__name__, compute_cache_key(keys, specialization, options)))
        return run(self, *arguments, grid=grid, warmup=warmup, **named)

    driver.set_active(NamedTarget())
    InterpretedFunction.run = watched
    try:
        yield seen
    finally:
        InterpretedFunction.run = run
        driver._active = active


assert triton.knobs.runtime.interpret, "launches are watched in the interpreter"
