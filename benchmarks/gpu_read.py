"""What reading some bytes takes a kernel that does nothing else: the floor of a product with few rows.

The bytes over the copy bandwidth leave out what every kernel pays, its start, the way of the first bytes and its end.
This kernel pays it: programs read equal, contiguous shares in long pipelined loads and add them up; it is launched as
the products are, one after another in a graph, over inputs that rotate.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from deepinfer_nvidia_sm100.measure import microseconds, rotations
from deepinfer_nvidia_sm100.ops.dependent import dependent, take_turn

SHAPES = ((4096, 5, 1), (4096, 3, 2), (2048, 6, 1))
"""Elements of a load, stages, and programs for each multiprocessor; the fastest counts."""


@triton.jit
def read_kernel(source, out, size, BLOCK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid (programs). ``source [size]`` int32; ``out [programs]`` int32: sums of the shares."""
    each = tl.cdiv(tl.cdiv(size, BLOCK), tl.num_programs(0)) * BLOCK
    low = tl.program_id(0) * each
    high = tl.minimum(low + each, size)
    place = tl.arange(0, BLOCK)
    take_turn(DEPENDENT)
    acc = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(low, high, BLOCK, num_stages=STAGES):
        acc += tl.load(source + start + place, mask=start + place < size, other=0)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


@functools.cache
def read_us(size: int) -> float:
    """Microseconds for this many bytes, a multiple of 4."""
    sources = [torch.ones(size // 4, dtype=torch.int32, device="cuda") for _ in range(rotations(size, 16))]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(2 * multiprocessors, dtype=torch.int32, device="cuda")
    spent = []
    for block, stages, each in SHAPES:
        programs = each * multiprocessors

        def read(source: torch.Tensor, block: int = block, stages: int = stages, programs: int = programs) -> None:
            options = {"BLOCK": block, "STAGES": stages, "num_warps": 4, **dependent(source)}
            read_kernel[programs,](source, out, source.numel(), **options)

        spent.append(microseconds([functools.partial(read, source) for source in sources]))
        assert int(out[:programs].sum()) == size // 4
    return min(spent)
