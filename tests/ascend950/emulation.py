"""The used torch_npu operators on the host: their real schemas, and float64 arithmetic written from their documents.

Defined through ``torch.library`` under the namespace ``npu``, so that the adapters run unchanged: torch's dispatcher
checks every call against the schema that torch_npu registers, and the conditions that the documents state are
asserted here. Nothing is taken from the adapters or from the core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

SCHEMAS = Path(__file__).parents[1] / "golden" / "ascend" / "torch_npu_2.13.0_schemas.txt"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALF = (torch.float16, torch.bfloat16)


def schemas() -> dict[str, str]:
    """Operator -> schema without the namespace."""
    found = {}
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"M npu::((\w+)\(.*)$", line):
            found[match.group(2)] = match.group(1)
    return found


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.dtype in FLOATS
    assert gamma.dtype == x.dtype
    assert 2 <= x.dim() <= 8
    wide = x.double()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse * gamma.double()).to(x.dtype), inverse.float()


def rotary_mul(
    x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", rotate: torch.Tensor | None = None
) -> torch.Tensor:
    assert rotate is None
    assert x.dim() == 4
    batch, rows, heads, width = x.shape
    assert r1.shape == r2.shape == (1, rows, 1, width)
    assert width % 2 == 0
    assert width < 896
    assert batch < 1000
    assert heads < 1000
    assert r1.abs().max() <= 1
    wide = x.double()
    if rotary_mode == "half":
        first, second = wide.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        assert batch * heads < 1000
        other = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return (r1.double() * wide + r2.double() * other).to(x.dtype)


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    assert x.dtype in FLOATS
    a, b = x.double().chunk(2, dim)
    return (a * torch.sigmoid(a) * b).to(x.dtype)


def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    assert x.is_contiguous()
    assert group_index is None
    assert x.dim() > 1
    wide = x.double()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim)
    a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return (a * torch.sigmoid(alpha * a) * (b + bias)).to(x.dtype)


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    assert cache_mode in (None, "Norm")
    assert key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    assert slot_mapping.dtype in (torch.int32, torch.int64)
    assert all(t.is_contiguous() for t in (key, value, key_cache, value_cache, slot_mapping))
    size = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        assert 0 <= slot < key_cache.shape[0] * size
        key_cache[slot // size, slot % size] = key[row]
        value_cache[slot // size, slot % size] = value[row]


def fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert input_layout == "TND"
    assert sparse_mode == 3
    assert query.dtype in HALF
    assert query.dtype == key.dtype == value.dtype
    assert atten_mask is not None
    assert atten_mask.shape == (2048, 2048)
    assert torch.equal(atten_mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    assert actual_seq_qlen is not None
    assert actual_seq_kvlen is not None
    assert block_table is not None
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == len(actual_seq_qlen) == len(actual_seq_kvlen)
    assert block_size == key.shape[1]
    assert block_size % 128 == 0
    assert block_size <= 512
    rows, heads, width = query.shape
    assert width == 128
    assert actual_seq_qlen[-1] == rows
    assert list(actual_seq_qlen) == sorted(actual_seq_qlen)
    output = torch.full(query.shape, float("nan"), dtype=torch.float64)
    start = 0
    for request, (end, length) in enumerate(zip(actual_seq_qlen, actual_seq_kvlen, strict=True)):
        blocks = block_table[request, : -(-length // block_size)].long()
        keys = key[blocks].reshape(-1, num_key_value_heads, width)[:length].double()
        values = value[blocks].reshape(-1, num_key_value_heads, width)[:length].double()
        for head in range(heads):
            group = head // (heads // num_key_value_heads)
            scores = query[start:end, head].double() @ keys[:, group].T * softmax_scale
            hidden = torch.ones(end - start, length, dtype=torch.bool).triu(length - (end - start) + 1)
            output[start:end, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, group]
        start = end
    return output.to(query.dtype), torch.zeros(1)


def grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    **others: object,
) -> list[torch.Tensor]:
    assert len(x) == len(weight) == 1
    assert (split_item, group_type, group_list_type) == (3, 0, 0)
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert len(group_list) == len(weight[0]) > 1
    assert max(*weight[0].shape[1:], x[0].shape[1]) < 65536
    ends = group_list.tolist()
    assert ends == sorted(ends)
    assert ends[-1] == len(x[0])
    starts = [0, *ends[:-1]]
    parts = [
        x[0][a:b].double() @ matrix.double() for a, b, matrix in zip(starts, ends, weight[0].unbind(), strict=True)
    ]
    return [torch.cat(parts).to(x[0].dtype)]


def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of one expert come in reverse here: the document does not say in which order they lie."""
    assert expert_idx.dtype == torch.int32
    assert (drop_pad_mode, expert_tokens_num_type, quant_mode, row_idx_type) == (0, 1, -1, 0)
    assert expert_tokens_num_flag
    assert list(active_expert_range) == [0, expert_num]
    assert active_num == expert_idx.numel()
    flat = expert_idx.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair], -pair))
    places = torch.empty(len(flat), dtype=torch.int32)
    places[torch.tensor(order)] = torch.arange(len(flat), dtype=torch.int32)
    rows = x[torch.tensor(order) // expert_idx.shape[1]]
    counts = torch.tensor([flat.count(expert) for expert in range(expert_num)])
    return rows, places, counts, torch.full((len(flat),), float("nan"))


def mhc_post(x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor) -> torch.Tensor:
    assert x.dtype in HALF
    assert x.dtype == h_out.dtype
    assert h_res is not None
    assert h_res.dtype == h_post.dtype == torch.float32
    kept = h_res.double().transpose(1, 2) @ x.double()
    return (kept + h_post.double()[:, :, None] * h_out.double()[:, None, :]).to(x.dtype)


KERNELS: dict[str, Callable[..., object]] = {
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu_mhc_post": mhc_post,
}

_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Define the operators once in this process. torch keeps them as long as the library lives."""
    if _LIBRARIES:
        return
    library = torch.library.Library("npu", "DEF")
    for name, schema in schemas().items():
        library.define(schema)
        library.impl(name, KERNELS[name], "CPU")
    _LIBRARIES.append(library)
