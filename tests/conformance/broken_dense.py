"""Mistakes in norms, products, rotary embedding, activation, embedding and the runner's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from broken import Wrapped, mutant

from deepinfer_core.api import QuantisedWeight, Supports, no, yes

NORM, LINEAR, ROPE, SWIGLU = "pointwise.rms_norm", "gemm.linear", "pointwise.rope", "pointwise.swiglu"


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "output 'y' at row 2")
def eps_outside_the_root(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + request.eps) * weight

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "tolerance")
def weight_plus_one(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, weight: right.run(x, weight + 1))


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "tolerance")
def statistics_in_16_bits(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = x.to(torch.bfloat16).square().mean(-1, keepdim=True).float()
        return x * torch.rsqrt(size + request.eps) * weight

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm[add]/float32/odd_rows", "output 'sum'")
def residual_forgotten(request: Any, right: Any) -> Any:
    return Wrapped(right, add=lambda x, residual, weight: (right.run(x + residual, weight), x.clone()))


@mutant(NORM, "pointwise.rms_norm[add]/float32/odd_rows", "changed its input 'x'")
def sum_written_over_x(request: Any, right: Any) -> Any:
    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x.add_(residual)
        return right.run(total, weight), total.clone()

    return Wrapped(right, add=add)


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "changed its input 'x'")
def norm_in_place(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, weight: x.copy_(right.run(x, weight)))


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "found nan")
def last_row_stale(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        output[:-1] = right.run(x, weight)[:-1]
        return output

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/results_kept", "same memory")
def one_buffer_for_all_calls(request: Any, right: Any) -> Any:
    buffer = torch.zeros(4096, request.hidden)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = right.run(x, weight).view(-1, request.hidden)
        return buffer[: len(flat)].copy_(flat).view(x.shape)

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/broken_rows", "found nan")
def scaled_by_the_largest_of_all_rows(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.clone()
        largest = x.abs().amax().clamp(min=1e-30)
        scaled = x / largest
        size = scaled.square().mean(-1, keepdim=True) + request.eps / largest.square()
        return scaled * torch.rsqrt(size) * weight

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/broken_rows", "expected its NaN to show")
def nan_swept_away(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, weight: right.run(x, weight).nan_to_num(0.0))


@mutant(NORM, "pointwise.rms_norm/float32/zero_rows", "raised")
def no_rows_unthought_of(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x[0]
        return right.run(x, weight)  # type: ignore[no-any-return]

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/strided_rows", "found nan")
def rows_taken_for_contiguous(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
        return right.run(flat, weight)  # type: ignore[no-any-return]

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "found dtype torch.float64")
def another_dtype_returned(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, weight: right.run(x, weight).double())


@mutant(NORM, "pointwise.rms_norm/float32/odd_rows", "wrote outside of 'x'")
def writes_beside_the_input(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = right.run(x, weight)
        if x.numel():
            x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(0.0)
        return result

    return Wrapped(right, run=run)


@mutant(
    NORM, "pointwise.rms_norm/float32/odd_rows", "must not refuse", fallback="error", supports=lambda r: no("not yet")
)
def refuses_everything(request: Any, right: Any) -> Any:
    return right


@mutant(
    NORM,
    "pointwise.rms_norm[heads]/float32/odd_rows",
    "hidden=64",
    fallback="error",
    supports=lambda r: no(f"hidden={r.hidden} is too small") if r.hidden < 100 else yes(9),
)
def refuses_too_much(request: Any, right: Any) -> Any:
    return right


@mutant(LINEAR, "gemm.linear[long]/float32/odd_rows", "tolerance")
def products_of_11_bits(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, weight: right.run(x.to(torch.float16).float(), weight))


@mutant(LINEAR, "gemm.linear[bias]/float32/odd_rows", "tolerance")
def bias_forgotten(request: Any, right: Any) -> Any:
    return Wrapped(right, prepare=lambda weights, bias=None: right.prepare(weights, None))


@mutant(LINEAR, "gemm.linear[merged]/float32/odd_rows", "tolerance")
def merged_parts_in_another_order(request: Any, right: Any) -> Any:
    return Wrapped(right, prepare=lambda weights, bias=None: right.prepare(weights[::-1], bias))


@mutant(LINEAR, "gemm.linear/float32/batch_invariant", "as among all rows", caps=("batch_invariant",))
def split_by_the_number_of_rows(request: Any, right: Any) -> Any:
    """Sums in two halves when there are few rows: right within the tolerance, and not invariant."""

    def run(x: torch.Tensor, weight: Any) -> torch.Tensor:
        half = x.shape[1] // 2
        if x.shape[0] > 8 or weight.bias is not None:
            return right.run(x, weight)  # type: ignore[no-any-return]
        parts = (x[:, :half] @ weight.weight[:, :half].T, x[:, half:] @ weight.weight[:, half:].T)
        return parts[0] + parts[1]

    return Wrapped(right, run=run)


@mutant(LINEAR, "gemm.linear/float32/deterministic", "as the first time")
def a_bit_of_chance(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, weight: Any) -> torch.Tensor:
        y: torch.Tensor = right.run(x, weight)
        return torch.where(torch.rand(y.shape) < 0.5, y, torch.nextafter(y, torch.full_like(y, 9e9)))

    return Wrapped(right, run=run)


@mutant(ROPE, "pointwise.rope/float32/odd_rows", "tolerance")
def neighbours_paired(request: Any, right: Any) -> Any:
    return right.again(interleaved=not request.interleaved)


@mutant(ROPE, "pointwise.rope/float32/odd_rows", "tolerance")
def positions_from_one(request: Any, right: Any) -> Any:
    return Wrapped(right, plan=lambda positions: right.plan((positions + 1).clamp(max=request.max_positions - 1)))


@mutant(ROPE, "pointwise.rope[inverse]/float32/odd_rows", "tolerance")
def inverse_ignored(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda x, plan, inverse=False: right.run(x, plan))


@mutant(ROPE, "pointwise.rope[yarn]/float32/odd_rows", "tolerance")
def scaling_ignored(request: Any, right: Any) -> Any:
    return right.again(scaling={})


@mutant(SWIGLU, "pointwise.swiglu/float32/odd_rows", "tolerance")
def halves_exchanged(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda gate_up: right.run(gate_up.roll(request.width, -1)))


@mutant(SWIGLU, "pointwise.swiglu[limit]/float32/odd_rows", "tolerance")
def limit_forgotten(request: Any, right: Any) -> Any:
    return right.again(limit=None)


@mutant("pointwise.embedding", "pointwise.embedding/float32/odd_rows", "row 0")
def last_id_out_of_reach(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda ids, weight: right.run(ids.clamp(max=request.vocab_size - 2), weight))


@mutant("runner.slot_mapping", "runner.slot_mapping/int64/odd_rows", "exactly")
def slots_in_32_bits(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda *arguments: right.run(*arguments).to(torch.int32).to(torch.int64))


@mutant("runner.append_tokens", "runner.append_tokens/int64/tokens", "found -1")
def failed_rows_stored_as_they_are(request: Any, right: Any) -> Any:
    def run(history: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        history[slots, positions] = tokens.to(torch.int32)

    return Wrapped(right, run=run)


@mutant("gemm.grouped", "gemm.grouped/float32/odd_rows", "found nan")
def last_group_dropped(request: Any, right: Any) -> Any:
    def run(x: torch.Tensor, offsets: torch.Tensor, weight: Any) -> torch.Tensor:
        output = torch.empty(x.shape[0], request.out_features)
        end = int(offsets[-2])
        output[:end] = right.run(x, offsets, weight)[:end]
        return output

    return Wrapped(right, run=run)


@mutant("gemm.grouped", "gemm.grouped[fp4:e2m1:1x32]/float32/odd_rows", "tolerance")
def halves_of_a_byte_exchanged(request: Any, right: Any) -> Any:
    def swapped(part: Any) -> Any:
        if not isinstance(part, QuantisedWeight) or part.format != "fp4:e2m1":
            return part
        codes = part.data.view(torch.uint8)
        return attrs.evolve(part, data=((codes << 4) | (codes >> 4)).view(torch.int8))

    return Wrapped(right, prepare=lambda weights: right.prepare([[swapped(p) for p in parts] for parts in weights]))


class Recording:
    """The host, with graphs that run their closure again on the same tensors."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def capture(self, fn: Callable[[], Any]) -> Any:
        fn()
        return Replayed(fn)


class Replayed:
    def __init__(self, fn: Callable[[], Any]) -> None:
        self.replay = fn


@mutant(NORM, "pointwise.rms_norm/float32/graph_capture", "replay 1", caps=("graph_capture",), device=Recording)
def result_kept_by_address(request: Any, right: Any) -> Any:
    kept: dict[int, torch.Tensor] = {}

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.data_ptr(), right.run(x, weight)).clone()

    return Wrapped(right, run=run)


@mutant(NORM, "pointwise.rms_norm/float32/one_row", "without a reason", supports=lambda r: Supports(None))
def refuses_without_a_reason(request: Any, right: Any) -> Any:
    return right


@mutant(NORM, "pointwise.rms_norm/float32/one_row", "score 5000", supports=lambda r: Supports(5000))
def a_score_beyond_the_scale(request: Any, right: Any) -> Any:
    return right


INPUTS, GATED = "fused.attention_inputs", "fused.gated_linear"


@mutant(INPUTS, "fused.attention_inputs/float32/odd_rows", "output 'key'")
def keys_as_queries_normed(request: Any, right: Any) -> Any:
    def run(qkv: torch.Tensor, cache: Any, plan: Any, q_norm: Any = None, k_norm: Any = None) -> torch.Tensor:
        return right.run(qkv, cache, plan, q_norm, q_norm)

    return Wrapped(right, run=run)


@mutant(INPUTS, "fused.attention_inputs/float32/odd_rows", "output 'query'")
def queries_not_rotated(request: Any, right: Any) -> Any:
    def run(qkv: torch.Tensor, cache: Any, plan: Any, q_norm: Any = None, k_norm: Any = None) -> torch.Tensor:
        right.run(qkv, cache, plan, q_norm, k_norm)
        heads = qkv[:, : request.q_heads * request.head_dim].reshape(len(qkv), request.q_heads, request.head_dim)
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + request.norm_eps) * q_norm

    return Wrapped(right, run=run)


@mutant(INPUTS, "fused.attention_inputs/float32/odd_rows", "output 'beside'")
def two_rows_written_for_one(request: Any, right: Any) -> Any:
    def run(qkv: torch.Tensor, cache: Any, plan: Any, q_norm: Any = None, k_norm: Any = None) -> torch.Tensor:
        query: torch.Tensor = right.run(qkv, cache, plan, q_norm, k_norm)
        rows = cache["key"].flatten(0, 1)
        rows[plan[0].slot_mapping + 1] = rows[plan[0].slot_mapping]
        return query

    return Wrapped(right, run=run)


@mutant(INPUTS, "fused.attention_inputs/float32/odd_rows", "output 'value'")
def values_rotated_too(request: Any, right: Any) -> Any:
    def run(qkv: torch.Tensor, cache: Any, plan: Any, q_norm: Any = None, k_norm: Any = None) -> torch.Tensor:
        query: torch.Tensor = right.run(qkv, cache, plan, q_norm, k_norm)
        rows = cache["value"].flatten(0, 1)
        rows[plan[0].slot_mapping] = rows[plan[0].slot_mapping].roll(1, -1)
        return query

    return Wrapped(right, run=run)


@mutant(INPUTS, "fused.attention_inputs/float32/odd_rows", "changed its input 'qkv'")
def rotated_where_it_lies(request: Any, right: Any) -> Any:
    def run(qkv: torch.Tensor, cache: Any, plan: Any, q_norm: Any = None, k_norm: Any = None) -> torch.Tensor:
        query: torch.Tensor = right.run(qkv, cache, plan, q_norm, k_norm)
        qkv[:, : request.q_heads * request.head_dim] = query.flatten(1)
        return query

    return Wrapped(right, run=run)


@mutant(GATED, "fused.gated_linear/float32/odd_rows", "tolerance")
def gate_and_up_exchanged(request: Any, right: Any) -> Any:
    return Wrapped(right, prepare=lambda weights, bias=None: right.prepare(list(weights)[::-1], bias))


@mutant(GATED, "fused.gated_linear[bias]/float32/odd_rows", "tolerance")
def bias_after_the_activation(request: Any, right: Any) -> Any:
    def prepare(weights: Any, bias: Any = None) -> Any:
        return right.prepare(weights, torch.zeros_like(bias)), bias

    def run(x: torch.Tensor, weight: Any) -> torch.Tensor:
        return right.run(x, weight[0]) + weight[1][: request.width]

    return Wrapped(right, prepare=prepare, run=run)


@mutant(GATED, "fused.gated_linear[limit]/float32/odd_rows", "tolerance")
def result_clamped_instead_of_the_products(request: Any, right: Any) -> Any:
    free = right.again(limit=None)
    return Wrapped(free, run=lambda x, weight: free.run(x, weight).clamp(-request.limit, request.limit))


SAMPLED = "fused.sample_tokens"


@mutant(SAMPLED, "fused.sample_tokens/float32/largest_rows", "output 'tokens'")
def draws_padding(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return right.run(logits, attrs.evolve(batch, token_limit=request.vocab_size))

    return Wrapped(right, run=run)


@mutant(SAMPLED, "fused.sample_tokens/float32/largest_rows", "output 'tokens'")
def leaves_a_stage_out(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return right.run(logits, attrs.evolve(batch, active=batch.active - {"top_p"}))

    return Wrapped(right, run=run)


@mutant(SAMPLED, "fused.sample_tokens/float32/odd_rows", "changed its input 'logits'")
def samples_where_the_logits_lie(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        logits[:, batch.token_limit :] = -torch.inf
        return right.run(logits, batch)

    return Wrapped(right, run=run)
