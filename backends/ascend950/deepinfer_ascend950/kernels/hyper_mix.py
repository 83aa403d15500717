"""The mix of hyper-connections in three kernels: coefficients, gates and Sinkhorn, weighted sum (spec: V4, 2.3).

Vector cores only. Per token: reads the streams twice (2 * M * hidden values) and ``fn`` once from the unified buffer's
point of view; ``fn`` (24 x 4 x hidden float32 for four streams) stays in the second-level cache over the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coefficients(x, fn, z, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``z [T, ROWS] = (x [T, WIDTH] @ fn [ROWS, WIDTH].T) / sqrt(mean(x^2) + eps)``; BLOCK divides WIDTH."""
    token = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        part = tl.load(x + token * WIDTH + start + lane).to(tl.float32)
        weight = tl.load(fn + rows[:, None] * WIDTH + (start + lane)[None, :])
        total += tl.sum(weight * part[None, :], 1)
        square += part * part
    scale = tl.rsqrt(tl.sum(square, 0) / WIDTH + eps)
    tl.store(z + token * ROWS + rows, total * scale)


@triton.jit
def gates(z, base, scale, pre, post, comb, eps, ROWS: tl.constexpr, M: tl.constexpr, ITERATIONS: tl.constexpr):
    """``z [T, ROWS]`` -> ``pre [T, M]``, ``post [T, M]`` and the balanced ``comb [T, M, M]``, all float32."""
    token = tl.program_id(0)
    i = tl.arange(0, M)
    p = tl.load(z + token * ROWS + i) * tl.load(scale) + tl.load(base + i)
    tl.store(pre + token * M + i, 1.0 / (1.0 + tl.exp(-p)) + eps)
    q = tl.load(z + token * ROWS + M + i) * tl.load(scale + 1) + tl.load(base + M + i)
    tl.store(post + token * M + i, 2.0 / (1.0 + tl.exp(-q)))
    cell = i[:, None] * M + i[None, :]
    s = tl.load(z + token * ROWS + 2 * M + cell) * tl.load(scale + 2) + tl.load(base + 2 * M + cell)
    s = tl.exp(s - tl.max(s, 1)[:, None])
    s = s / tl.sum(s, 1)[:, None] + eps
    s = s / (tl.sum(s, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        s = s / (tl.sum(s, 1)[:, None] + eps)
        s = s / (tl.sum(s, 0)[None, :] + eps)
    tl.store(comb + token * M * M + cell, s)


@triton.jit
def weighted_sum(x, pre, out, M: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """``out [T, HIDDEN] = sum_j pre [T, j] * x [T, j, HIDDEN]``; BLOCK divides HIDDEN."""
    token = tl.program_id(0)
    i = tl.arange(0, M)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(pre + token * M + i)
    part = tl.load(x + token * M * HIDDEN + i[:, None] * HIDDEN + lane[None, :]).to(tl.float32)
    tl.store(out + token * HIDDEN + lane, tl.sum(part * weight[:, None], 0).to(out.dtype.element_ty))
