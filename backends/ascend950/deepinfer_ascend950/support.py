"""Which requests the adapters take, and why they refuse the others. Plain Python: no torch, no device.

Every limit stands in the operator's document (``torch_npu/_op_plugin_docs.py`` of the wheel); the adapter's docstring
says which. Refused is also what the documents leave open, since an adapter never approximates silently. Operators
without any adapter, and why, are in :mod:`.capabilities`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from deepinfer_core.api import (
    BatchedLinearRequest,
    CompressRequest,
    GroupedLinearRequest,
    HyperConnectionRequest,
    IndexTopKRequest,
    LinearRequest,
    MoeExchangeRequest,
    PagedAttentionRequest,
    RopeRequest,
    Supports,
    WriteKVRequest,
    no,
    yes,
)

SCORE = 200
HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float32")
INNER_LIMIT = 65536
BLOCK_MULTIPLE, BLOCK_MOST = 128, 512
HEAD_DIM = 128
GROUP_MOST = 64
HEADS_BELOW, ROTARY_BELOW = 1000, 896
EXPERTS_MOST = 10240
LANES, TILE = 64, 16


def _dtype(request: Any, allowed: tuple[str, ...], *fields: str) -> Supports:
    for field in fields:
        found = getattr(request, field)
        if found not in allowed:
            return no(f"{field} is {found}; the operator takes {', '.join(allowed)}")
    return yes(SCORE)


def pointwise(request: Any) -> Supports:
    """RMS norm and SwiGLU: any of the three dtypes."""
    return _dtype(request, FLOATS, "dtype")


def rope(request: RopeRequest) -> Supports:
    kind = request.scaling.get("rope_type", request.scaling.get("type", "default"))
    if kind == "yarn":
        return no("rope_scaling yarn multiplies cos and sin by a factor above 1; the operator takes [-1, 1]")
    if request.rotary_dim >= ROTARY_BELOW:
        return no(f"rotary_dim is {request.rotary_dim}; the operator takes less than {ROTARY_BELOW}")
    return _dtype(request, FLOATS, "dtype")


def write_kv(request: WriteKVRequest) -> Supports:
    if request.cache_dtype != request.dtype:
        return no(f"cache_dtype is {request.cache_dtype}, dtype {request.dtype}; the operator wants one for both")
    return _dtype(request, FLOATS, "dtype")


def paged(request: PagedAttentionRequest) -> Supports:
    if request.window is not None:
        return no("the document does not say how a band is aligned when keys outnumber queries; no windows")
    if request.sinks:
        return no("sinks are float32; the operator takes bfloat16 and would round them")
    if request.softcap is not None:
        return no("the operator has no soft cap")
    if request.head_dim != HEAD_DIM:
        return no(f"head_dim is {request.head_dim}; layout TND takes {HEAD_DIM}")
    if request.block_size % BLOCK_MULTIPLE or request.block_size > BLOCK_MOST:
        return no(
            f"block_size is {request.block_size}; the operator takes multiples of {BLOCK_MULTIPLE} up to {BLOCK_MOST}: "
            f"set kv_cache.block_size={BLOCK_MULTIPLE}"
        )
    if request.q_heads > GROUP_MOST * request.kv_heads:
        return no(f"{request.q_heads // request.kv_heads} query heads share a key head; at most {GROUP_MOST}")
    if request.kv_heads * request.head_dim >= INNER_LIMIT:
        return no(f"kv_heads * head_dim is {request.kv_heads * request.head_dim}; below {INNER_LIMIT} in this layout")
    if request.cache_dtype != request.dtype:
        return no(f"cache_dtype is {request.cache_dtype}, dtype {request.dtype}; the operator wants one for both")
    return _dtype(request, HALF, "dtype")


def linear(request: LinearRequest | BatchedLinearRequest | GroupedLinearRequest) -> Supports:
    if request.weight_dtype.startswith(("fp8:", "fp4:")):
        return no(f"weights stored as {request.weight_dtype}: the quantised products round activations too")
    if request.out_dtype != request.dtype:
        return no(f"out_dtype is {request.out_dtype}, dtype {request.dtype}: the product has the dtype of x")
    return _dtype(request, FLOATS, "dtype")


def grouped(request: GroupedLinearRequest) -> Supports:
    if request.in_features >= INNER_LIMIT or request.out_features >= INNER_LIMIT:
        return no(f"{request.in_features} x {request.out_features}: inner dimensions stay below {INNER_LIMIT}")
    if request.groups < 2:
        return no("a group list of one entry is refused by the operator")
    return linear(request)


def exchange(request: MoeExchangeRequest) -> Supports:
    if request.experts > EXPERTS_MOST:
        return no(f"{request.experts} experts; the operator takes {EXPERTS_MOST}")
    return _dtype(request, FLOATS, "dtype")


def hyper_connection(request: HyperConnectionRequest) -> Supports:
    return _dtype(request, HALF, "dtype")


def hyper_mix(request: HyperConnectionRequest) -> Supports:
    """The own kernel, for powers of two of streams and hidden sizes with a power of two of 64 lanes or more."""
    if missing := _no_triton():
        return missing
    if request.streams & (request.streams - 1):
        return no(f"streams is {request.streams}; the kernel takes powers of two")
    if request.hidden % LANES:
        return no(f"hidden is {request.hidden}; the kernel takes multiples of {LANES}")
    verdict = hyper_connection(request)
    return yes(SCORE, "not run on hardware") if verdict else verdict


def index_topk(request: IndexTopKRequest) -> Supports:
    """The own kernel: tiles of the cube cores, powers of two from 16 up."""
    if missing := _no_triton():
        return missing
    for name, size in (
        ("heads", request.heads),
        ("head_dim", request.head_dim),
        ("block_size / rate", request.block_size // request.rate),
    ):
        if size < TILE or size & (size - 1):
            return no(f"{name} is {size}; the kernel takes powers of two from {TILE}")
    if request.cache_dtype != request.dtype:
        return no(f"cache_dtype is {request.cache_dtype}, dtype {request.dtype}; the kernel wants one for both")
    verdict = _dtype(request, FLOATS, "dtype")
    return yes(SCORE, "not run on hardware") if verdict else verdict


def compress(request: CompressRequest) -> Supports:
    """The own kernel: whole vectors of 64 lanes."""
    if missing := _no_triton():
        return missing
    if request.head_dim % LANES:
        return no(f"head_dim is {request.head_dim}; the kernel takes multiples of {LANES}")
    verdict = _dtype(request, FLOATS, "dtype")
    return yes(SCORE, "not run on hardware") if verdict else verdict


def _no_triton() -> Supports | None:
    """A refusal where Triton is not installed. On an NPU it must be the one that knows Ascend."""
    if find_spec("triton") is None:
        return no("triton is not installed: pip install triton-ascend")
    return None
