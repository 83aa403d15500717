"""Scores of the lightning indexer, one page of keys after another (spec: V4, 2.5).

The products run on the cube cores, ReLU and the weighted sum over heads on the vector cores. Per query row and page:
``2 * H * D * N`` operations and ``N * D`` keys read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_scores(q, k, w, table, out, blocks, H: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """``out [T, blocks * N] = sum_h relu(q [T, h] . k) * w [T, h]`` over the pages ``table [T, blocks]`` of N keys."""
    token = tl.program_id(0)
    block = tl.program_id(1)
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    n = tl.arange(0, N)
    page = tl.load(table + token * blocks + block).to(tl.int64)
    query = tl.load(q + token * H * D + h[:, None] * D + d[None, :])
    keys = tl.load(k + page * N * D + n[:, None] * D + d[None, :])
    products = tl.dot(query, tl.trans(keys), input_precision="ieee")
    weight = tl.load(w + token * H + h)
    score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
    tl.store(out + token * blocks * N + block * N + n, score)
