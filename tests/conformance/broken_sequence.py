"""Mistakes in attention, caches, experts and sampling."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from broken import Wrapped, mutant
from broken_dense import Recording

from deepinfer_core.api import LayerCache, SamplingBatch, StepLayout, no, yes

PAGED, WRITE, SPARSE, STAGE = "attention.paged", "attention.write_kv", "attention.sparse", "sampling.stage"


def _paged(variant: str, name: str) -> str:
    return f"attention.paged{f'[{variant}]' if variant else ''}/float32/{name}"


@mutant(PAGED, _paged("window", "long"), "tolerance")
def window_one_too_long(request: Any, right: Any) -> Any:
    return right.again(window=request.window + 1)


@mutant(PAGED, _paged("window", "decode"), "tolerance")
def window_one_too_short(request: Any, right: Any) -> Any:
    return right.again(window=request.window - 1)


@mutant(PAGED, _paged("sinks", "decode"), "tolerance")
def sink_forgotten(request: Any, right: Any) -> Any:
    def run(query: Any, cache: Any, plan: Any, sinks: torch.Tensor) -> Any:
        return right.run(query, cache, plan, torch.full_like(sinks, float("-inf")))

    return Wrapped(right, run=run)


@mutant(PAGED, _paged("softcap", "mixed"), "tolerance")
def softcap_forgotten(request: Any, right: Any) -> Any:
    return right.again(softcap=None)


@mutant(PAGED, _paged("", "decode"), "tolerance")
def heads_grouped_the_other_way(request: Any, right: Any) -> Any:
    """Query head h reads key head h mod kv_heads, not h div group."""
    order = torch.arange(request.q_heads).view(-1, request.kv_heads).T.flatten()

    def run(query: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        output: torch.Tensor = right.run(query[:, order].contiguous(), cache, plan)
        return output[:, order.argsort()].contiguous()

    return Wrapped(right, run=run)


def _lengthened(layout: StepLayout, tokens: int) -> StepLayout:
    """The layout with contexts rounded up to whole blocks of tokens, rows where they are."""
    longer = -(-layout.host_seq_lens // tokens) * tokens
    return attrs.evolve(layout, host_seq_lens=longer.astype(np.int32), max_seq_len=int(longer.max(initial=0)))


@mutant(PAGED, _paged("", "decode"), "found nan")
def last_block_read_to_its_end(request: Any, right: Any) -> Any:
    """Masked by a zero weight, which a NaN left behind survives."""
    return Wrapped(right, plan=lambda layout: right.plan(_lengthened(layout, layout.block_size)))


@mutant(PAGED, _paged("", "prefill"), "tolerance")
def chunks_see_their_end(request: Any, right: Any) -> Any:
    """Not causal within a chunk."""

    def plan(layout: StepLayout) -> Any:
        last = torch.from_numpy(np.repeat(layout.host_seq_lens - 1, layout.host_query_lens).astype(np.int64))
        return right.plan(attrs.evolve(layout, positions=last))

    return Wrapped(right, plan=plan)


@mutant(PAGED, _paged("", "verify"), "shape")
def one_row_for_each_request(request: Any, right: Any) -> Any:
    """Decode rows that carry drafts are not thought of: the last row stands for all."""

    def run(query: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        output: torch.Tensor = right.run(query, cache, plan)
        ends = torch.tensor([part.end - 1 for part in plan], dtype=torch.int64)
        return output if len(plan) == 0 else output[ends]

    return Wrapped(right, run=run)


@mutant(PAGED, _paged("", "extremes"), "found nan")
def softmax_without_its_maximum(request: Any, right: Any) -> Any:
    def attend(query: torch.Tensor, cache: LayerCache, part: Any) -> torch.Tensor:
        group = request.q_heads // request.kv_heads
        key, value = (cache[n][part.blocks, part.offsets].repeat_interleave(group, 1) for n in ("key", "value"))
        scores = torch.einsum("qhd,chd->hqc", query[part.start : part.end], key) * request.scale
        weights = scores.exp().masked_fill(~part.visible, 0.0)
        return torch.einsum("hqc,chd->qhd", weights / weights.sum(-1, keepdim=True), value)

    def run(query: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        parts = [attend(query, cache, part) for part in plan]
        return torch.cat(parts) if parts else query.clone()

    return Wrapped(right, run=run)


@mutant(PAGED, _paged("", "decode"), "wrote to the cache")
def keys_scaled_in_the_cache(request: Any, right: Any) -> Any:
    def run(query: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        output: torch.Tensor = right.run(query, cache, plan)
        cache["key"].mul_(0.5)
        return output

    return Wrapped(right, run=run)


@mutant(PAGED, _paged("", "batch_invariant"), "as among the others", caps=("batch_invariant",))
def keys_padded_to_the_longest(request: Any, right: Any) -> Any:
    """Sums run over the batch's longest context in pieces: the order of additions depends on the neighbours."""

    def plan(layout: StepLayout) -> Any:
        return right.plan(layout), layout.max_seq_len

    def run(query: torch.Tensor, cache: LayerCache, planned: Any) -> torch.Tensor:
        parts, longest = planned
        output = torch.zeros_like(query)
        for part in parts:
            exact: torch.Tensor = right.run(query, cache, [part])[part.start : part.end]
            nudge = torch.full_like(exact, 1e30 if longest % 3 else -1e30)
            output[part.start : part.end] = torch.nextafter(exact, nudge)
        return output

    return Wrapped(right, plan=plan, run=run)


@mutant(PAGED, _paged("", "broken_rows"), "found nan")
def one_nan_for_all(request: Any, right: Any) -> Any:
    def run(query: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        output: torch.Tensor = right.run(query, cache, plan)
        return output + 0.0 * output.sum() if output.numel() else output

    return Wrapped(right, run=run)


@mutant(WRITE, "attention.write_kv/float32/decode", "expected only the")
def one_row_too_many(request: Any, right: Any) -> Any:
    def run(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        after = (layout.slot_mapping + 1) % (cache["key"].shape[0] * layout.block_size)
        right.run(torch.zeros_like(key), torch.zeros_like(value), cache, attrs.evolve(layout, slot_mapping=after))
        right.run(key, value, cache, layout)

    return Wrapped(right, run=run)


@mutant(WRITE, "attention.write_kv/float32/prefill", "entry 'value'")
def values_one_row_short(request: Any, right: Any) -> Any:
    def run(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        right.run(key, value, cache, layout)
        if len(value):
            last = int(layout.slot_mapping[-1])
            cache["value"][last // layout.block_size, last % layout.block_size] = 0.0

    return Wrapped(right, run=run)


@mutant(WRITE, "attention.write_kv/float32/rewritten", "tolerance")
def rows_written_once_only(request: Any, right: Any) -> Any:
    def run(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, layout: StepLayout) -> None:
        block, row = layout.slot_mapping // layout.block_size, layout.slot_mapping % layout.block_size
        free = cache["key"][block, row].isnan().flatten(1).any(1)
        part = attrs.evolve(layout, slot_mapping=layout.slot_mapping[free])
        right.run(key[free], value[free], cache, part)

    return Wrapped(right, run=run)


@mutant("kv_layout.paged", "kv_layout.paged/float32/full", "block_bytes")
def bytes_of_one_layer_announced(request: Any, right: Any) -> Any:
    return Wrapped(right, block_bytes=lambda: right.block_bytes() // request.group.layers)


@mutant("kv_layout.paged", "kv_layout.paged/float32/full", "zeros")
def blocks_left_as_found(request: Any, right: Any) -> Any:
    def allocate(count: int) -> Any:
        return [{name: t.fill_(float("nan")) for name, t in cache.items()} for cache in right.allocate(count)]

    return Wrapped(right, allocate=allocate)


@mutant("kv_layout.paged", "kv_layout.paged/float32/full", "share memory")
def one_cache_for_all_layers(request: Any, right: Any) -> Any:
    return Wrapped(right, allocate=lambda count: right.allocate(count)[:1] * request.group.layers)


@mutant(SPARSE, "attention.sparse[chosen]/float32/long", "tolerance")
def choice_ignored(request: Any, right: Any) -> Any:
    return Wrapped(
        right, run=lambda q, cache, entries, plan, sinks, chosen=None: right.run(q, cache, entries, plan, sinks)
    )


@mutant(SPARSE, "attention.sparse[window]/float32/decode", "tolerance")
def sparse_sink_forgotten(request: Any, right: Any) -> Any:
    def run(q: Any, cache: Any, entries: Any, plan: Any, sinks: torch.Tensor, chosen: Any = None) -> Any:
        return right.run(q, cache, entries, plan, torch.full_like(sinks, float("-inf")), chosen)

    return Wrapped(right, run=run)


@mutant("attention.index_topk", "attention.index_topk/float32/ties", "exactly")
def ties_to_the_highest_entry(request: Any, right: Any) -> Any:
    def run(query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: Any) -> torch.Tensor:
        chosen = torch.full((len(query), request.top_k), -1, dtype=torch.int64)
        for part in plan:
            keys = cache["key"][part.blocks, part.offsets]
            for row in range(part.start, part.end):
                seen = part.visible[row - part.start]
                products = torch.relu(torch.einsum("hd,nd->hn", query[row], keys))
                scores = (products * weights[row, :, None] * request.scale).sum(0).masked_fill(~seen, float("-inf"))
                best = scores.flip(0).sort(descending=True, stable=True).indices[: min(request.top_k, int(seen.sum()))]
                chosen[row, : len(best)] = (len(scores) - 1 - best).sort().values
        return chosen

    return Wrapped(right, run=run)


@mutant("attention.compress", "attention.compress[overlap]/float32/token_by_token", "tolerance")
def windows_only_within_a_step(request: Any, right: Any) -> Any:
    """Tokens of earlier steps are taken for absent."""

    def plan(tail: StepLayout, entries: StepLayout) -> Any:
        made = right.plan(tail, entries)
        first = torch.from_numpy((tail.host_seq_lens - tail.host_query_lens).astype(np.int64))
        owner = torch.from_numpy(np.repeat(np.arange(len(first)), tail.host_query_lens))
        closing = (tail.positions + 1) % request.rate == 0
        span = made.absent.shape[1]
        place = tail.positions[closing][:, None] - torch.arange(span - 1, -1, -1)
        return attrs.evolve(made, absent=made.absent | (place < first[owner[closing]][:, None]))

    return Wrapped(right, plan=plan)


@mutant("moe.route", "moe.route[sigmoid]/float32/odd_rows", "output 'ids'")
def ties_to_the_highest_expert(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, **more: Any) -> Any:
        ids, weights = right.run(logits.flip(1), **more)
        return (request.experts - 1 - ids).flip(1).contiguous(), weights.flip(1).contiguous()

    return Wrapped(right, run=run)


@mutant("moe.route", "moe.route[bias]/float32/odd_rows", "output 'weights'")
def bias_in_the_weights(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, bias: torch.Tensor) -> Any:
        ids, _ = right.run(logits, bias)
        scores = torch.nn.functional.softplus(logits).sqrt() + bias
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) * request.scale

    return Wrapped(right, run=run)


@mutant("moe.exchange", "moe.exchange/float32/round_trip", "weights of expert")
def expert_weight_dropped(request: Any, right: Any) -> Any:
    def dispatch(*arguments: Any) -> Any:
        sent = right.dispatch(*arguments)
        return attrs.evolve(sent, weights=torch.where(torch.arange(len(sent.weights)) < 3, 1.0, sent.weights))

    return Wrapped(right, dispatch=dispatch)


@mutant("moe.exchange", "moe.exchange/float32/counted_once", "expected 2.5")
def first_expert_counted_twice(request: Any, right: Any) -> Any:
    """As when every rank that holds a copy of an expert answers for it."""

    def combine(outputs: torch.Tensor, handle: Any) -> torch.Tensor:
        twice = outputs.clone()
        twice[:1] *= 2
        return right.combine(twice, handle)  # type: ignore[no-any-return]

    return Wrapped(right, combine=combine)


@mutant("pointwise.hyper_connection", "pointwise.hyper_connection/float32/odd_rows", "output 'merged'")
def mixing_matrix_transposed(request: Any, right: Any) -> Any:
    def merge(streams: torch.Tensor, output: torch.Tensor, mixed: Any) -> Any:
        post, comb = mixed
        return right.merge(streams, output, (post, comb.transpose(1, 2)))

    return Wrapped(right, merge=merge)


@mutant("pointwise.quantise_dequantise", "pointwise.quantise_dequantise[fp8]/float32/odd_rows", "tolerance 0")
def one_scale_for_a_row(request: Any, right: Any) -> Any:
    return right.again(group=request.channels)


def _stage(stage: str, name: str) -> str:
    return f"sampling.stage[{stage}]/float32/{name}"


def _only(stage: str) -> Any:
    return lambda request: yes(100) if request.stage == stage else no(f"serves {stage}")


@mutant(STAGE, _stage("draw", "wherever_it_stands"), "as before", supports=_only("draw"))
def seed_by_row(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        state = attrs.evolve(batch.state, child=batch.state.child + 0)
        rows = torch.arange(len(logits))
        own = {name: getattr(state, name)[batch.slots] for name in ("temperature", "seed_hi", "child")}
        return right.run(logits, attrs.evolve(batch, slots=rows, state=attrs.evolve(state, **own, seed_lo=rows)))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("draw", "golden_vectors"), "golden vector", supports=_only("draw"))
def child_ignored(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        return right.run(logits, attrs.evolve(batch, state=attrs.evolve(batch.state, child=batch.state.child * 0)))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("draw", "odd_rows"), "exactly", supports=_only("draw"))
def ties_to_the_highest_id(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens: torch.Tensor = right.run(logits, batch)
        greedy = batch.state.temperature[batch.slots] == 0
        last = logits.shape[1] - 1 - logits.flip(1).argmax(1)
        return torch.where(greedy & (tokens >= 0), last, tokens)

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("draw", "chi_square"), "chance", supports=_only("draw"))
def noise_half_as_strong(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda logits, batch: right.run(logits * 1.2, batch))


@mutant(STAGE, _stage("draw", "odd_rows"), "expected -1", supports=_only("draw"))
def broken_rows_drawn_from(request: Any, right: Any) -> Any:
    return Wrapped(right, run=lambda logits, batch: right.run(logits.nan_to_num(0.0, posinf=9.0), batch))


@mutant(STAGE, _stage("top_k", "odd_rows"), "expected -inf", supports=_only("top_k"))
def all_ties_kept(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        count = batch.state.top_k[batch.slots]
        on = (count > 0) & (count < logits.shape[1])
        place = (torch.where(on, count, logits.shape[1]) - 1)[:, None]
        least = logits.sort(1, descending=True).values.gather(1, place)
        return logits.masked_fill(logits < least, float("-inf"))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("top_p", "odd_rows"), "found -inf", supports=_only("top_p"))
def token_that_crosses_top_p_removed(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        top_p = batch.state.top_p[batch.slots, None]
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        over = (ordered.softmax(-1).cumsum(-1) > top_p) & (top_p < 1)
        over[:, :1] = False
        return logits.masked_fill(torch.zeros_like(over).scatter_(1, order, over), float("-inf"))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("temperature", "off_rows"), "its request is off", supports=_only("temperature"))
def every_row_divided(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        temperature = batch.state.temperature[batch.slots, None].clamp(min=1e-5)
        return (logits - logits.amax(1, keepdim=True)) / temperature

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("penalties", "odd_rows"), "tolerance", supports=_only("penalties"))
def prompt_counted_as_output(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        state = attrs.evolve(batch.state, prompt_len=batch.state.prompt_len * 0)
        return right.run(logits, attrs.evolve(batch, state=state))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("mask,grammar", "odd_rows"), "expected -inf", supports=_only("mask"))
def second_word_of_the_mask_ignored(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        grammar = None if batch.grammar is None else batch.grammar.clone()
        if grammar is not None:
            grammar[:, 1:] = -1
        return right.run(logits, attrs.evolve(batch, grammar=grammar))

    return Wrapped(right, run=run)


@mutant(STAGE, _stage("logprobs", "odd_rows"), "output 'rank'", supports=_only("logprobs"))
def ranks_of_ties_equal(request: Any, right: Any) -> Any:
    def run(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Any:
        found = right.run(logits, ids, k)
        found.rank = (logits > logits.gather(1, ids[:, None])).sum(1) + 1
        return found

    return Wrapped(right, run=run)


@mutant(PAGED, _paged("", "graph_capture"), "replay 1", caps=("graph_capture",), device=Recording)
def host_numbers_recorded(request: Any, right: Any) -> Any:
    """Plans by the host's lengths, which a recorded step does not have."""
    return right


@mutant(STAGE, _stage("verify", "chi_square"), "chance", supports=_only("verify"))
def drafts_taken_too_gladly(request: Any, right: Any) -> Any:
    """The coin is thrown against a draft distribution that is taken for flat."""

    def run(logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, judged: Any) -> Any:
        flat = None if judged.scores is None else torch.zeros_like(judged.scores)
        return right.run(logits, batch, tokens, attrs.evolve(judged, scores=flat))

    return Wrapped(right, run=run)


@mutant("pointwise.quantise_dequantise", "pointwise.quantise_dequantise/any/drawn", "drawn request")
def groups_of_eight_only(request: Any, right: Any) -> Any:
    return right if request.group < 32 else right.again(group=8)


@mutant(PAGED, "attention.paged/any/drawn", "tolerance")
def heads_of_80_channels_cut(request: Any, right: Any) -> Any:
    """A tile of 64: nobody wrote a case with 80 channels."""
    if request.head_dim != 80:
        return right

    def run(query: torch.Tensor, cache: LayerCache, plan: Any, *sinks: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = right.run(query, cache, plan, *sinks)
        output[..., 64:] = 0.0
        return output

    return Wrapped(right, run=run)
