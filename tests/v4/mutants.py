"""DeepSeek-V4 with one mistake at a time: each replaces operators of a table by ones that are wrong in one point.

A mutant is a function ``(slot, request, build) -> operator or None``; None leaves the slot as it is, ``build`` makes
the reference operator of a request. The mistakes are those that ports of the model were found to make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    CompressRequest,
    HyperConnectionRequest,
    IndexTopKRequest,
    OpRequest,
    RmsNormRequest,
    RopeRequest,
    RouteRequest,
    SparseAttentionRequest,
    SwigluRequest,
)
from deepinfer_core.reference.dtypes import widen
from v4.support import Build, Mutant

MUTANTS: dict[str, Mutant] = {}


class Wrapped:
    """An operator with some methods replaced."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def mutant(function: Mutant) -> Mutant:
    MUTANTS[function.__name__] = function
    return function


def changed(name: str, kinds: type | tuple[type, ...], when: Callable[[Any], bool], **fields: Any) -> None:
    """A mutant that builds every request of these kinds with other fields."""

    def build_changed(slot: str, request: OpRequest, build: Build) -> Any:
        if isinstance(request, kinds) and when(request):
            return build(attrs.evolve(request, **fields))
        return None

    MUTANTS[name] = build_changed


def always(_: Any) -> bool:
    return True


def scaled(request: Any) -> bool:
    return bool(request.scaling)


ROTATING = (RopeRequest, CompressRequest)
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}
changed("no_swiglu_clamp", SwigluRequest, always, limit=None)
changed("no_top_k", IndexTopKRequest, always, top_k=64)
changed("theta_of_window_layers_everywhere", ROTATING, scaled, theta=1e4)
changed("compress_theta_40000", ROTATING, scaled, theta=4e4)
changed("no_yarn", ROTATING, scaled, scaling={})
changed("yarn_in_window_layers", RopeRequest, lambda r: not r.scaling, scaling=YARN | {"attention_factor": 1.0})
changed("yarn_amplitude", ROTATING, scaled, scaling=YARN | {"attention_factor": 1.2772588722239782})
changed("half_split_rope", RopeRequest, always, interleaved=False)
changed("rope_on_the_first_channels", RopeRequest, always, trailing=False)
changed("one_sinkhorn_round_less", HyperConnectionRequest, always, iterations=19)
changed("window_one_short", SparseAttentionRequest, always, window=7)
changed("window_one_long", SparseAttentionRequest, always, window=9)
changed("weights_not_normalised", RouteRequest, always, normalise=False)
changed("no_routed_scale", RouteRequest, always, scale=1.0)
changed("softmax_router", RouteRequest, always, scoring="softmax")


@mutant
def no_query_head_norm(slot: str, request: OpRequest, build: Build) -> Any:
    if slot != "head_norm" or not isinstance(request, RmsNormRequest):
        return None
    op = build(request)
    return Wrapped(op, run=lambda x, weight: x if x.dim() == 3 else op.run(x, weight))


@mutant
def no_inverse_rope(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, RopeRequest):
        return None
    op = build(request)
    return Wrapped(op, run=lambda x, plan, inverse=False: x if inverse else op.run(x, plan))


@mutant
def no_sink(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, SparseAttentionRequest):
        return None
    op = build(request)

    def run(q: Any, cache: Any, entries: Any, plan: Any, sinks: torch.Tensor, chosen: Any = None) -> Any:
        return op.run(q, cache, entries, plan, torch.full_like(sinks, float("-inf")), chosen)

    return Wrapped(op, run=run)


@mutant
def clamp_after_the_product(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, SwigluRequest):
        return None
    op = build(attrs.evolve(request, limit=None))
    return Wrapped(op, run=lambda gate_up: op.run(gate_up).clamp(-10, 10))


@mutant
def gate_clamped_from_below_too(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, SwigluRequest):
        return None
    op = build(request)
    return Wrapped(op, run=lambda gate_up: op.run(gate_up.clamp(min=-1.0)))


def hyper(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Mutant:
    def build_changed(slot: str, request: OpRequest, build: Build) -> Any:
        if not isinstance(request, HyperConnectionRequest):
            return None
        op = build(request)
        return Wrapped(op, merge=lambda streams, output, mixed: op.merge(streams, output, change(*mixed)))

    return build_changed


MUTANTS["post_without_its_factor_2"] = hyper(lambda post, comb: (post / 2, comb))
MUTANTS["mixing_matrix_transposed"] = hyper(lambda post, comb: (post, comb.transpose(1, 2)))


def compressing(when: Callable[[CompressRequest], bool], change: Callable[..., Any]) -> Mutant:
    """``change(request, value, gate, position_bias)`` -> what the compressor gets instead."""

    def build_changed(slot: str, request: OpRequest, build: Build) -> Any:
        if not isinstance(request, CompressRequest) or not when(request):
            return None
        op = build(request)

        def run(value: Any, gate: Any, tail: Any, entries: Any, plan: Any, bias: Any, norm: Any) -> None:
            value, gate, bias = change(request, value, gate, bias)
            op.run(value, gate, tail, entries, plan, bias, norm)

        return Wrapped(op, run=run)

    return build_changed


def overlapping(request: CompressRequest) -> bool:
    return request.overlap


def swapped(request: CompressRequest, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.roll(t, request.head_dim, dims=-1) for t in tensors)


def without_a(request: CompressRequest, value: Any, gate: torch.Tensor, bias: Any) -> Any:
    gate = gate.clone()
    gate[:, : request.head_dim] = float("-inf")
    return value, gate, bias


MUTANTS["halves_swapped"] = compressing(overlapping, swapped)
MUTANTS["no_overlap"] = compressing(overlapping, without_a)
MUTANTS["no_position_bias"] = compressing(always, lambda request, value, gate, bias: (value, gate, bias * 0))


def replanned(kind: type, change: Callable[..., Any]) -> Mutant:
    """``change(operator, request, *layouts)`` -> the step's plan instead."""

    def build_changed(slot: str, request: OpRequest, build: Build) -> Any:
        if not isinstance(request, kind):
            return None
        op = build(request)
        return Wrapped(op, plan=lambda *layouts: change(op, request, *layouts))

    return build_changed


def at_the_entry_number(op: Any, request: CompressRequest, tail: Any, entries: Any) -> Any:
    closing = tail.positions[(tail.positions + 1) % request.rate == 0]
    rotation = op._rope.plan(torch.div(closing, request.rate, rounding_mode="floor"))
    return attrs.evolve(op.plan(tail, entries), rotation=rotation)


def not_rotated(op: Any, request: CompressRequest, tail: Any, entries: Any) -> Any:
    plan = op.plan(tail, entries)
    return attrs.evolve(plan, rotation=op._rope.plan(torch.zeros_like(plan.entry_blocks)))


def without_earlier_steps(op: Any, request: CompressRequest, tail: Any, entries: Any) -> Any:
    """The window before this step is forgotten: what a state reset at every step does."""
    plan = op.plan(tail, entries)
    first = tail.seq_lens.long() - torch.tensor(tail.host_query_lens).long()
    closing = tail.positions[(tail.positions + 1) % request.rate == 0]
    span = plan.absent.shape[1]
    read = closing[:, None] - torch.arange(span - 1, -1, -1)
    in_window = torch.arange(span) >= span - request.rate
    return attrs.evolve(plan, absent=plan.absent | ((read < int(first[0])) & ~in_window))


def late(layout: Any) -> Any:
    return attrs.evolve(layout, positions=layout.positions - 1)


def newest_keys_only(op: Any, request: IndexTopKRequest, layout: Any) -> Any:
    parts = []
    for part in op.plan(layout):
        first = int(layout.positions[part.start]) // request.rate
        parts.append(attrs.evolve(part, visible=part.visible & (torch.arange(part.visible.shape[1]) >= first)))
    return parts


MUTANTS["entries_rotated_at_their_number"] = replanned(CompressRequest, at_the_entry_number)
MUTANTS["entries_not_rotated"] = replanned(CompressRequest, not_rotated)
MUTANTS["overlap_lost_between_steps"] = replanned(CompressRequest, without_earlier_steps)
MUTANTS["index_entries_visible_one_token_late"] = replanned(IndexTopKRequest, lambda op, r, x: op.plan(late(x)))
MUTANTS["index_keys_of_the_newest_step_only"] = replanned(IndexTopKRequest, newest_keys_only)
MUTANTS["entries_visible_one_token_late"] = replanned(
    SparseAttentionRequest, lambda op, r, window, entries=None: op.plan(window, entries and late(entries))
)


def scoring(formula: Callable[..., torch.Tensor]) -> Mutant:
    def build_changed(slot: str, request: OpRequest, build: Build) -> Any:
        if not isinstance(request, IndexTopKRequest):
            return None
        op = build(request)
        op.scores = formula
        return op

    return build_changed


def unrelued(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.einsum("qhd,nd,qh->qn", widen(query), widen(keys), weights)


def relu_after_weights(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.einsum("qhd,nd,qh->qhn", widen(query), widen(keys), weights).relu().sum(1)


MUTANTS["index_relu_dropped"] = scoring(unrelued)
MUTANTS["index_relu_after_the_weights"] = scoring(relu_after_weights)


@mutant
def weights_from_biased_scores(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, RouteRequest) or request.given:
        return None
    op = build(request)

    def run(logits: torch.Tensor, bias: torch.Tensor, counts: Any = None) -> Any:
        ids, _ = op.run(logits, bias, counts=counts)
        weights = (torch.nn.functional.softplus(logits).sqrt() + bias).gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) * request.scale

    return Wrapped(op, run=run)


@mutant
def choice_without_bias(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, RouteRequest) or request.given:
        return None
    op = build(request)
    return Wrapped(op, run=lambda logits, bias, counts=None: op.run(logits, bias * 0, counts=counts))


@mutant
def hash_experts_of_the_token_before(slot: str, request: OpRequest, build: Build) -> Any:
    if not isinstance(request, RouteRequest) or not request.given:
        return None
    op = build(request)
    return Wrapped(op, run=lambda logits, given, counts=None: op.run(logits, given=given.roll(1, 0), counts=counts))


@mutant
def shared_expert_times_routed_scale(slot: str, request: OpRequest, build: Build) -> Any:
    if slot != "shared_down":
        return None
    op = build(request)
    return Wrapped(op, run=lambda x, weight: op.run(x, weight) * 1.5)
