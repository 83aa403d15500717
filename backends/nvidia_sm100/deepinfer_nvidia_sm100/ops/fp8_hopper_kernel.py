"""The kernel of :mod:`.fp8_hopper`, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""How blocks of rows and weights lie in shared memory."""
SWIZZLED_OUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""And results in 16 bits."""
ZERO, ONE, TWO = (gl.constexpr(number) for number in range(3))
"""Of groups that multiply."""


@gluon.jit
def _tile_of(number, rows, columns, TOGETHER: gl.constexpr):
    each = TOGETHER * columns
    first = number // each * TOGETHER
    height = gl.minimum(rows - first, TOGETHER)
    return first + number % each % height, number % each // height


@gluon.jit
def _copy(given, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr):
    """The warp that copies: blocks of rows and of the weight, as soon as their place in the ring is free."""
    x, weight, x_ring, weight_ring, full, empty, M, N, K = given
    rows = gl.cdiv(M, BLOCK_M)
    columns = gl.cdiv(N, BLOCK_N)
    HEIGHT: gl.constexpr = x.block_shape[0]
    PARTS: gl.constexpr = BLOCK_M // HEIGHT
    count = 0
    for number in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        tile_row, tile_column = _tile_of(number, rows, columns, TOGETHER)
        for step in range(K // 128):
            place = count % STAGES
            mbarrier.wait(empty.index(place), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(place), (BLOCK_M + BLOCK_N) * 128)
            for part in gl.static_range(PARTS):
                top = tile_row * BLOCK_M + part * HEIGHT
                block = x_ring.index(place * PARTS + part)
                tma.async_copy_global_to_shared(x, [top, step * 128], full.index(place), block)
            tma.async_copy_global_to_shared(
                weight, [tile_column * BLOCK_N, step * 128], full.index(place), weight_ring.index(place)
            )
            count += 1


@gluon.jit
def _scaled(product, scale, acc):
    """``acc + product * scale``, in assembly: it is done before the next product starts, which needs the registers."""
    wide, _ = gl.broadcast(scale[:, None], product)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, wide, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _store(
    acc,
    out,
    out_box,
    staged,
    bias,
    top,
    left,
    row,
    M,
    N,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
    BIAS: gl.constexpr,
    BOX: gl.constexpr,
):
    column = left + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if BIAS:
        acc += gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    if BOX:
        tma.store_wait(0)
        staged.store(acc.to(out.dtype.element_ty))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_box, [top, left], staged)
    else:
        place = row.to(gl.int64)[:, None] * N + column[None, :]
        gl.store(out + place, acc.to(out.dtype.element_ty), mask=(row < M)[:, None] & (column < N)[None, :])


@gluon.jit
def _begin(
    x_ring, weight_ring, full, count, FIRST: gl.constexpr, product, never, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Start one step's product of 64 rows, from a tile's row FIRST on, under WAIT when its blocks have come."""
    HEIGHT: gl.constexpr = x_ring.shape[1]
    PARTS: gl.constexpr = BLOCK_M // HEIGHT
    place = count % STAGES
    if WAIT:
        mbarrier.wait(full.index(place), (count // STAGES) & 1)
    mine = x_ring.index(place * PARTS + FIRST // HEIGHT).slice(FIRST % HEIGHT, 64, dim=0)
    block = weight_ring.index(place).permute((1, 0))
    return warpgroup_mma(mine, block, product, use_acc=never, is_async=True)


@gluon.jit
def _place(
    number, scale, x_scale, M, N, steps, FIRST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    TOGETHER: gl.constexpr, SCALE_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Of 64 rows of a tile, from its row FIRST on: the first row and column, all rows, and where their scales lie."""
    tile_row, tile_column = _tile_of(number, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), TOGETHER)
    top = tile_row * BLOCK_M + FIRST
    left = tile_column * BLOCK_N
    row = top + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return top, left, row, scale + left // SCALE_ROWS * steps, x_scale + row


@gluon.jit
def _overlapped(
    x_ring, weight_ring, staged, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride,
    NUMBER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, SCALE_ROWS: gl.constexpr, UNROLLED: gl.constexpr, BIAS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """A group that multiplies 64 of a tile's 128 rows. There are registers for two products: while one is added, the
    next is computed. None may be under way at the end of a loop's turn, or the compiler lets each wait for the last:
    so UNROLLED steps make a turn."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    FIRST: gl.constexpr = NUMBER * 64
    steps = K // 128
    count = 0
    never = M < 0
    even = gl.zeros([64, BLOCK_N], gl.float32, layout)
    odd = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for number in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        top, left, row, of_block, of_row = _place(
            number, scale, x_scale, M, N, steps, FIRST, BLOCK_M, BLOCK_N, TOGETHER, SCALE_ROWS, layout
        )
        acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
        # Scales are asked for one step ahead: their way from the cache is longer than a step.
        next_block = gl.load(of_block)
        next_row = gl.load(of_row, mask=row < M, other=0.0)
        for step in range(0, steps, UNROLLED):
            even = _begin(x_ring, weight_ring, full, count, FIRST, even, never, BLOCK_M, STAGES, True)
            for turn in gl.static_range(UNROLLED):
                block = next_block
                by_row = next_row
                ahead = gl.minimum(step + turn + 1, steps - 1)
                next_block = gl.load(of_block + ahead)
                next_row = gl.load(of_row + ahead * scale_stride, mask=row < M, other=0.0)
                if turn % 2 == 0:
                    if turn + 1 < UNROLLED:
                        odd = _begin(x_ring, weight_ring, full, count + 1, FIRST, odd, never, BLOCK_M, STAGES, True)
                        even = warpgroup_mma_wait(1, deps=(even,))
                    else:
                        even = warpgroup_mma_wait(0, deps=(even,))
                    mbarrier.arrive(empty.index(count % STAGES), count=1)
                    acc = _scaled(even, by_row * block, acc)
                else:
                    if turn + 1 < UNROLLED:
                        even = _begin(x_ring, weight_ring, full, count + 1, FIRST, even, never, BLOCK_M, STAGES, True)
                        odd = warpgroup_mma_wait(1, deps=(odd,))
                    else:
                        odd = warpgroup_mma_wait(0, deps=(odd,))
                    mbarrier.arrive(empty.index(count % STAGES), count=1)
                    acc = _scaled(odd, by_row * block, acc)
                count += 1
        _store(acc, out, out_box, staged, bias, top, left, row, M, N, BLOCK_N, layout, BIAS, BOX)


@gluon.jit
def _by_turns(
    x_ring, weight_ring, staged, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride,
    NUMBER: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, SCALE_ROWS: gl.constexpr, BIAS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """A group that multiplies 64 of a tile's 192 rows, or 128 of its 256 by halves: there are registers for one
    product, and while it is added the matrix unit works for the other groups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    FIRST: gl.constexpr = NUMBER * HALVES * 64
    steps = K // 128
    count = 0
    # Every product starts from nothing. Said at run time, and with the last one as what it would be added to, so that
    # it must wait for that one's numbers to be used and takes over their registers.
    never = M < 0
    product = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for number in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        top, left, row, of_block, of_row = _place(
            number, scale, x_scale, M, N, steps, FIRST, BLOCK_M, BLOCK_N, TOGETHER, SCALE_ROWS, layout
        )
        acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
        other = gl.zeros([64, BLOCK_N], gl.float32, layout)
        next_block = gl.load(of_block)
        next_row = gl.load(of_row, mask=row < M, other=0.0)
        next_other = next_row
        if HALVES == 2:
            next_other = gl.load(of_row + 64, mask=row + 64 < M, other=0.0)
        for step in range(steps):
            by_row = next_row * next_block
            by_other = next_other * next_block
            ahead = gl.minimum(step + 1, steps - 1)
            next_block = gl.load(of_block + ahead)
            next_row = gl.load(of_row + ahead * scale_stride, mask=row < M, other=0.0)
            if HALVES == 2:
                next_other = gl.load(of_row + 64 + ahead * scale_stride, mask=row + 64 < M, other=0.0)
            product = _begin(x_ring, weight_ring, full, count, FIRST, product, never, BLOCK_M, STAGES, True)
            product = warpgroup_mma_wait(0, deps=(product,))
            if HALVES == 2:
                acc = _scaled(product, by_row, acc)
                product = _begin(x_ring, weight_ring, full, count, FIRST + 64, product, never, BLOCK_M, STAGES, False)
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(count % STAGES), count=1)
                other = _scaled(product, by_other, other)
            else:
                mbarrier.arrive(empty.index(count % STAGES), count=1)
                acc = _scaled(product, by_row, acc)
            count += 1
        _store(acc, out, out_box, staged, bias, top, left, row, M, N, BLOCK_N, layout, BIAS, BOX)
        if HALVES == 2:
            _store(other, out, out_box, staged, bias, top + 64, left, row + 64, M, N, BLOCK_N, layout, BIAS, BOX)


@gluon.jit
def _group(
    given, NUMBER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    TOGETHER: gl.constexpr, SCALE_ROWS: gl.constexpr, UNROLLED: gl.constexpr, BIAS: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    x_ring, weight_ring, staged, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride = given
    mine = staged.index(NUMBER)
    if BLOCK_M == 128:
        _overlapped(
            x_ring, weight_ring, mine, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride,
            NUMBER, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX,
        )  # fmt: skip
    else:
        _by_turns(
            x_ring, weight_ring, mine, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride,
            NUMBER, BLOCK_M // 128, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, BIAS, BOX,
        )  # fmt: skip
    if BOX:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "scale_stride"])
def fp8_hopper_kernel(
    x, x_scale, weight, scale, bias, out, out_box, M, N, K, scale_stride,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TOGETHER: gl.constexpr,
    SCALE_ROWS: gl.constexpr, UNROLLED: gl.constexpr,
    BIAS: gl.constexpr, BOX: gl.constexpr, OUT_LAYOUT: gl.constexpr, MULTIPLYING: gl.constexpr, COPYING: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Grid (programs). Descriptors ``x [M, K]``, ``weight [N, K]`` of blocks (BLOCK_M, 128) and (BLOCK_N, 128), e4m3.

    ``x_scale [K / 128, M]``, ``scale [ceil(N / SCALE_ROWS), K / 128]`` float32, ``out [M, N]``; SCALE_ROWS is a
    multiple of BLOCK_N, 64 or 128. BLOCK_M is 128 or 256, or 192 with blocks of 64 rows of ``x``. BOX: ``out_box`` is a
    descriptor of ``out`` in blocks of (64, BLOCK_N).
    """
    HEIGHT: gl.constexpr = x.block_shape[0]
    GROUPS: gl.constexpr = 3 if BLOCK_M == 192 else 2
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * (BLOCK_M // HEIGHT), HEIGHT, 128], x.layout)
    weight_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, 128], weight.layout)
    if BOX:
        staged = gl.allocate_shared_memory(out.dtype.element_ty, [GROUPS, 64, BLOCK_N], OUT_LAYOUT)
    else:
        staged = x_ring  # not used
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    if DEPENDENT:  # before the other warps begin: none reads anything earlier
        gdc_launch_dependents()
        gdc_wait()
    given = (x_ring, weight_ring, staged, full, empty, x_scale, scale, bias, out, out_box, M, N, K, scale_stride)
    copied = (x, weight, x_ring, weight_ring, full, empty, M, N, K)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_group, (given, ZERO, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX)),
                (_group, (given, ONE, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX)),
                (_group, (given, TWO, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX)),
                (_copy, (copied, BLOCK_M, BLOCK_N, STAGES, TOGETHER)),
            ],
            [4, 4, 1],
            [MULTIPLYING, MULTIPLYING, COPYING],
        )
    else:
        gl.warp_specialize(
            [
                (_group, (given, ZERO, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX)),
                (_group, (given, ONE, BLOCK_M, BLOCK_N, STAGES, TOGETHER, SCALE_ROWS, UNROLLED, BIAS, BOX)),
                (_copy, (copied, BLOCK_M, BLOCK_N, STAGES, TOGETHER)),
            ],
            [4, 1],
            [MULTIPLYING, COPYING],
        )
