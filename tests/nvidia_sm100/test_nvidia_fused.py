"""Regions against the reference's composition of their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from gpu_support import DEVICE, DTYPES, ON_GPU, close, eligible, here, operator
from reference_support import layout
from reference_support import operator as reference

from deepinfer_core.api import AttentionInputsRequest, GatedLinearRequest

SCALINGS: list[dict[str, Any]] = [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}]


def normal(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape).to(getattr(torch, dtype))


def inputs_request(heads: int, kv_heads: int, dim: int, dtype: str, **changes: Any) -> AttentionInputsRequest:
    fields: dict[str, Any] = {
        "cache_group": "full",
        "q_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "theta": 1e4,
        "max_positions": 300,
        "norm_eps": 1e-6,
        "dtype": dtype,
        "cache_dtype": dtype,
        "block_size": 4,
    }
    return AttentionInputsRequest(**(fields | changes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.get("rope_type", "default"))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (9, 3, 64), (32, 8, 128), (2, 1, 256), (3, 3, 16)])
def test_attention_inputs(heads: int, kv_heads: int, dim: int, scaling: dict[str, Any], norm: bool, dtype: str) -> None:
    """Rows that decode, prompt rows and drafts: queries, the cache rows written, and all others left alone."""
    request = inputs_request(heads, kv_heads, dim, dtype, scaling=scaling, norm_eps=1e-6 if norm else None)
    ours, theirs = operator(request), reference(request)
    where, blocks = layout([1, 3, 5, 1], [4, 9, 5, 77], 4, seed=int(torch.randint(0, 1 << 20, ())))
    wide = normal(10, (heads + 2 * kv_heads) * dim + 8, dtype=dtype)
    qkv = wide[:, : (heads + 2 * kv_heads) * dim]  # rows that lie apart
    weights = [normal(dim, dtype=dtype) for _ in range(2 if norm else 0)]
    expected = {n: torch.full((blocks, 4, kv_heads, dim), 7.0, dtype=qkv.dtype) for n in ("key", "value")}
    found = here({name: tensor.clone() for name, tensor in expected.items()})
    moved = here(where)
    query = ours.run(here(wide)[:, : qkv.shape[1]], found, ours.plan(moved), *here_all(weights))
    close(query, theirs.run(qkv, expected, theirs.plan(where), *weights), dtype)
    close(found["key"], expected["key"], dtype)
    assert torch.equal(found["value"].cpu(), expected["value"])
    untouched = torch.ones(blocks * 4, dtype=torch.bool)
    untouched[where.slot_mapping] = False
    assert bool((found["key"].cpu().flatten(0, 1)[untouched] == 7.0).all())


def here_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [here(tensor) for tensor in tensors]


def test_attention_inputs_of_no_rows() -> None:
    op = operator(inputs_request(4, 2, 32, "float32"))
    where, blocks = layout([], [], 4)
    cache = here({n: torch.full((blocks, 4, 2, 32), 7.0) for n in ("key", "value")})
    weight = here(torch.ones(32))
    assert op.run(here(torch.zeros(0, 256)), cache, op.plan(here(where)), weight, weight).shape == (0, 4, 32)
    assert bool((cache["key"] == 7.0).all())


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"head_dim": 48}, "head_dim 48"), ({"cache_dtype": "float16"}, "cache_dtype float16 is neither dtype float32")],
)
def test_attention_inputs_it_refuses(changes: dict[str, Any], says: str) -> None:
    request = inputs_request(4, 2, 32, "float32", **changes)
    assert eligible(request) == []
    from deepinfer_nvidia_sm100.plugin import deepinfer_fused
    from gpu_support import INFO, on_cuda

    (provider,) = (p for p in deepinfer_fused(INFO) if p.op == request.op)
    assert says in provider.supports(on_cuda(request)).reason


TILES = [
    Tile(block_n=16, block_m=16, block_k=32, splits=1, stages=2, warps=4),
    Tile(block_n=64, block_m=16, block_k=32, splits=3, stages=2, warps=4),
    Tile(block_n=32, block_m=32, block_k=16, splits=2, stages=2, warps=4),
    Tile(block_n=128, block_m=16, block_k=64, splits=1, stages=2, warps=4, described=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 48, 96), (5, 40, 100), (33, 64, 64)])
@pytest.mark.parametrize(("bias", "limit"), [(False, None), (True, 0.5)])
def test_gated_tiles(
    rows: int, width: int, inner: int, tile: Tile, bias: bool, limit: float | None, dtype: str
) -> None:
    """Every way of tiling: uneven edges, several splits, bias and clamp; the counters are zero again afterwards."""
    request = GatedLinearRequest(
        in_features=inner, width=width, dtype=dtype, weight_dtype=dtype, bias=bias, limit=limit
    )
    theirs = reference(request)
    x, weight = normal(rows, inner, dtype=dtype), normal(2 * width, inner, dtype=dtype) / inner**0.5
    offsets = normal(2 * width, dtype=dtype) if bias else None
    out = torch.full((rows, width), torch.nan, dtype=x.dtype, device=DEVICE)
    arrived = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    moved = None if offsets is None else here(offsets)
    launch(here(x), here(weight), moved, out, tile, arrived, gated=True, limit=limit)
    close(out, theirs.run(x, theirs.prepare([weight[:width], weight[width:]], offsets)), dtype)
    assert not arrived.any()


@pytest.mark.skipif(not ON_GPU, reason="cuBLAS, and products in 16 bits")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "inner"), [(9728, 2560), (1536, 576), (100, 72)])
def test_gated_linear(width: int, inner: int, dtype: str) -> None:
    """Numbers of rows on both sides of where cuBLAS takes over."""
    request = GatedLinearRequest(in_features=inner, width=width, dtype=dtype, weight_dtype=dtype)
    ours = operator(request)
    weight = here(normal(2 * width, inner, dtype=dtype) / inner**0.5)
    packed = ours.prepare([weight[:width], weight[width:]])
    for rows in (0, 1, 7, 16, 33, 64, 65, 300):
        x = here(normal(rows, inner, dtype=dtype))
        wide = x.double() @ weight.double().T
        gate, up = wide.chunk(2, dim=1)
        close(ours.run(x, packed), (torch.nn.functional.silu(gate) * up).cpu(), dtype)
