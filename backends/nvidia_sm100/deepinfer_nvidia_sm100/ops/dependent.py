"""Dependent launches: a kernel may be brought to the multiprocessors while the one before it still runs.

Hundreds of kernels of a few microseconds make a decode step, and starting one costs about as much as its work. So
each kernel of a step begins by letting the next one come in, and then waits for the one before it: nothing is read or
written before that. Waiting covers all earlier kernels, since each of them waited. Needs compute capability 9.0.
(Asking for weights during the wait, by prefetching them to the second-level cache, was tried: steps became 2 to 11 %
slower.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton built without this vendor: nothing here is launched then
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def take_turn(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs come in, then wait until everything that earlier kernels wrote is there."""
    if DEPENDENT:
        if DEPENDENT == 1:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_in_late(DEPENDENT: tl.constexpr):
    """For a kernel whose programs :func:`take_turn` left the next one outside: now it may come in."""
    if DEPENDENT == 2:
        gdc_launch_dependents()


@triton.jit
def let_next_in(DEPENDENT: tl.constexpr):
    """The first half of :func:`take_turn`, for a kernel that has something to do before it waits."""
    if DEPENDENT == 1:
        gdc_launch_dependents()


@triton.jit
def wait_turn(DEPENDENT: tl.constexpr):
    """The second half."""
    if DEPENDENT:
        gdc_wait()


def dependent(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch options, by where the kernel runs: the interpreter knows no such thing."""
    on = tensor.device.type == "cuda"
    return {"DEPENDENT": on, "launch_pdl": on}
