"""Paged attention and the writing of its cache, over every shape of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, PagedAttentionRequest, WriteKVRequest
from deepinfer_core.conformance.case import Case, Mismatch, NotApplicable, Tier
from deepinfer_core.conformance.compare import check_close, check_equal, check_form
from deepinfer_core.conformance.memory import check_fresh, check_guards, guard, poisoned_allocations
from deepinfer_core.conformance.target import Chosen, Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding, unit_roundoff

from .caches import Group, check_rows, check_unchanged, open_group, snapshot
from .listing import other_dtypes
from .operation import generator, normal, widened
from .steps import CHUNKS, DECODE, LONG, MIXED, PREFILL, VERIFY, Step, make_step


@attrs.frozen(kw_only=True)
class Shape:
    """Heads, and which of the optional terms are on."""

    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Paged:
    """An attention operator with its cache, written by the backend's own ``write_kv``."""

    def __init__(self, target: Target, shape: Shape, step: Step, seed: str) -> None:
        self.target, self.shape, self.step = target, shape, step
        draw = generator(seed)
        s, tokens = shape, sum(step.contexts)
        self.key = normal(draw, tokens, s.kv_heads, s.head_dim, dtype=s.torch_dtype)
        self.value = normal(draw, tokens, s.kv_heads, s.head_dim, dtype=s.torch_dtype)
        self.query = normal(draw, step.rows, s.q_heads, s.head_dim, dtype=s.torch_dtype)
        self.sinks = normal(draw, s.q_heads) if s.sinks else None
        entries = tuple(CacheEntry(name, (s.kv_heads, s.head_dim), s.dtype) for name in ("key", "value"))
        group = CacheGroupSpec(name="kv", layers=1, entries=entries, **_window(s.window))
        self.group = open_group(target, group, step.num_blocks, step.block_size)
        common: dict[str, Any] = {
            "cache_group": "kv",
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "dtype": s.dtype,
            "cache_dtype": s.dtype,
            "block_size": step.block_size,
            "device_type": target.device.info.type,
            "demands": {self.group.demand},
            "layer_kind": "full" if s.window is None else "window",
        }
        self.write_request = WriteKVRequest(**common)
        self.request = PagedAttentionRequest(
            **common,
            q_heads=s.q_heads,
            scale=s.head_dim**-0.5,
            window=s.window,
            softcap=s.softcap,
            sinks=s.sinks,
        )
        self.write: Chosen = target.choose(self.write_request)
        self.paged: Chosen = target.choose(self.request)

    @property
    def label(self) -> str:
        return f"attention.paged by {self.paged.label}"

    def fill(self) -> None:
        """Write every token of the step's requests, in one step of its own, as a prefill does."""
        self.target.work(lambda: write(self.target, self.write.operator, self.group, self.step.whole(), *self.kv()))
        oracle = self.target.oracle(widened(self.write_request))
        oracle.run(self.key.double(), self.value.double(), self.group.oracle, self.step.whole().layout())

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key, self.value

    def run(self, step: Step | None = None, query: torch.Tensor | None = None, *, wide_rows: int = 0) -> torch.Tensor:
        """Attend; check form, guards, freshness and that the cache stays as it is; output on the host."""
        step, target = step or self.step, self.target
        query = self.query if query is None else query
        before = snapshot(target, self.group.cache)

        def work() -> tuple[torch.Tensor, dict[str, Any]]:
            guarded = {"query": guard(query, target.put, wide_rows=wide_rows)}
            if self.sinks is not None:
                guarded["sinks"] = guard(self.sinks, target.put)
            sinks = (guarded["sinks"].tensor,) if self.sinks is not None else ()
            plan = self.paged.operator.plan(step.layout(target.put))
            output = self.paged.operator.run(guarded["query"].tensor, self.group.cache, plan, *sinks)
            return output, guarded

        with poisoned_allocations():
            output, guarded = target.work(work)
        check_form(self.label, output, tuple(query.shape), self.shape.torch_dtype)
        check_guards(self.label, guarded, frozenset(), target.get)
        check_fresh(self.label, {"output": output}, guarded, frozenset())
        check_unchanged(self.label, before, snapshot(target, self.group.cache))
        return target.get(output)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in float64, and its bound.

        A score is a float32 sum of ``head_dim`` products: off by ``gamma`` of their magnitudes, which Cauchy and
        Schwarz bound. That moves a weight by a factor of at most ``exp(2 delta)``. Fused kernels round weights to the
        cache's dtype before they multiply the values; the sum over the context adds its own ``gamma``.
        """
        op = self.target.oracle(widened(self.request))
        plan, query = op.plan(self.step.layout()), self.query.double()
        sinks = () if self.sinks is None else (self.sinks.double(),)
        output = op.run(query, self.group.oracle, plan, *sinks)
        magnitude = op.run(
            query, {"key": self.group.oracle["key"], "value": self.group.oracle["value"].abs()}, plan, *sinks
        )
        longest = self.key.double().nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1).amax() if len(self.key) else 0.0
        score = self.request.scale * query.nan_to_num().norm(dim=-1, keepdim=True) * longest
        delta = (gamma(self.shape.head_dim) + FUNCTION * U32) * score
        if self.shape.softcap is not None:
            delta = delta + FUNCTION * U32 * self.shape.softcap
        relative = torch.expm1(2 * delta) + gamma(max(self.step.contexts, default=0)) + FUNCTION * U32
        relative = relative + unit_roundoff(self.shape.torch_dtype)
        return output, relative * magnitude + rounding(output, self.shape.torch_dtype)

    def check(self, **options: Any) -> None:
        """Fill, attend, compare."""
        self.fill()
        output = self.run(**options)
        expected, bound = self.expected()
        check_close(self.label, output, expected, bound)


def _window(window: int | None) -> dict[str, Any]:
    return {} if window is None else {"kind": "window", "window": window}


def write(target: Target, op: Any, group: Group, step: Step, key: torch.Tensor, value: torch.Tensor) -> None:
    """Launch one write; called inside device work."""
    op.run(target.put(key), target.put(value), group.cache, step.layout(target.put))


Check = Callable[[Target, Shape], str]


def _attends(requests: Sequence[tuple[int, int]], target: Target, shape: Shape) -> str:
    step = make_step(requests, generator(str(requests)), window=shape.window)
    paged = Paged(target, shape, step, f"{shape} {requests}")
    paged.check()
    return paged.paged.label


def _extremes(target: Target, shape: Shape) -> str:
    """Scores in the hundreds: a softmax that does not subtract its maximum overflows."""
    step = make_step(MIXED, generator("extremes"), window=shape.window)
    paged = Paged(target, shape, step, f"{shape} extremes")
    paged.query[1::2] *= 100
    paged.value[::3] *= 1000
    paged.check()
    return paged.paged.label


def _strided(target: Target, shape: Shape) -> str:
    paged = Paged(target, shape, make_step(MIXED, generator("strided"), window=shape.window), f"{shape} strided")
    paged.check(wide_rows=128)
    return paged.paged.label


def _broken(target: Target, shape: Shape) -> str:
    """One request whose keys, values and queries are NaN or infinite: the others do not notice."""
    requests = ((1, 20), (1, 33), (3, 19), (1, 40))
    paged = Paged(target, shape, make_step(requests, generator("broken"), window=shape.window), f"{shape} broken")
    paged.query[1] = float("nan")
    paged.key[20 : 20 + 33 : 2], paged.value[20 : 20 + 33] = float("inf"), float("nan")
    paged.fill()
    output = paged.run()
    expected, bound = paged.expected()
    keep = torch.tensor([0, 2, 3, 4, 5])
    check_close(f"{paged.label}, beside a request of NaN", output[keep], expected[keep], bound[keep])
    if output[1].isfinite().all():
        raise Mismatch(f"{paged.label}, row 1: found finite values, expected the NaN of its query to show")
    return paged.paged.label


def _results_kept(target: Target, shape: Shape) -> str:
    """A second call leaves the first one's result alone."""
    paged = Paged(target, shape, make_step(DECODE, generator("kept"), window=shape.window), f"{shape} kept")
    paged.fill()
    op = paged.paged.operator
    sinks = () if paged.sinks is None else (paged.sinks,)

    def attend(query: torch.Tensor) -> torch.Tensor:
        plan = op.plan(paged.step.layout(target.put))
        output: torch.Tensor = op.run(target.put(query), paged.group.cache, plan, *map(target.put, sinks))
        return output

    first = target.work(lambda: attend(paged.query))
    before = target.get(first)
    target.work(lambda: attend(-paged.query))
    check_equal(f"{paged.label}, after a second call", target.get(first), before, "unchanged")
    return paged.paged.label


def _batch_invariant(target: Target, shape: Shape) -> str:
    """Bitwise the same for a request alone and among others, in any order."""
    step = make_step(MIXED, generator("invariant"), window=shape.window)
    paged = Paged(target, shape, step, f"{shape} invariant")
    _claims(paged, "batch_invariant")
    paged.fill()
    whole = paged.run()
    for request in range(len(step.queries)):
        rows = step.rows_of(request)
        alone = paged.run(step.alone(request), paged.query[rows])
        check_equal(f"{paged.label}, request {request} alone", alone, whole[rows], "as among the others")
    single = make_step([(1, c) for _, c in MIXED], generator("invariant"), window=shape.window)
    last = torch.tensor([step.rows_of(r).stop - 1 for r in range(len(step.queries))])
    decoded = paged.run(attrs.evolve(single, table=step.table, num_blocks=step.num_blocks), paged.query[last])
    check_equal(f"{paged.label}, last rows decoded alone", decoded, whole[last], "as in their chunks")
    return paged.paged.label


def _deterministic(target: Target, shape: Shape) -> str:
    paged = Paged(target, shape, make_step(LONG, generator("again"), window=shape.window), f"{shape} again")
    _claims(paged, "deterministic")
    paged.fill()
    first = paged.run()
    for _ in range(3):
        check_equal(f"{paged.label}, repeated", paged.run(), first, "as the first time")
    return paged.paged.label


def _claims(paged: Paged, cap: str) -> None:
    if cap not in paged.paged.provider.caps:
        raise NotApplicable(f"{paged.paged.label} does not claim {cap}")


def _writes(requests: Sequence[tuple[int, int]], target: Target, shape: Shape) -> str:
    """The step's rows are written, to the last bit, and no other."""
    paged = Paged(target, shape, make_step(requests, generator(str(requests))), f"{shape} write {requests}")
    group, step, label = paged.group, paged.step, f"attention.write_kv by {paged.write.label}"
    rows = torch.arange(step.rows)
    key, value = paged.key[: step.rows], paged.value[: step.rows]
    before = snapshot(target, group.cache)
    kept = target.work(lambda: {"key": guard(key, target.put), "value": guard(value, target.put)})
    layout = target.work(lambda: step.layout(target.put))
    target.work(lambda: paged.write.operator.run(kept["key"].tensor, kept["value"].tensor, group.cache, layout))
    check_guards(label, kept, frozenset(), target.get)
    after = snapshot(target, group.cache)
    check_rows(label, group, before, after, step.slots)
    if group.layout == "paged":
        for entry, written in (("key", key), ("value", value)):
            found = after[entry].flatten(0, 1)[step.slots]
            check_equal(f"{label}, entry {entry!r}", found, written[rows])
    return paged.write.label


def _rewrites(target: Target, shape: Shape) -> str:
    """Rows written twice hold what was written last, as after a rejected draft."""
    paged = Paged(target, shape, make_step(VERIFY, generator("rewrite"), window=shape.window), f"{shape} rewrite")
    whole = paged.step.whole()
    target.work(lambda: write(target, paged.write.operator, paged.group, whole, -paged.key, 2 * paged.value))
    paged.check()
    return paged.write.label


def _case(op: str, name: str, tier: Tier, check: Check, shape: Shape, variant: str = "", required: bool = True) -> Case:
    def ask(target: Target) -> str:
        return check(target, shape)

    title = f"{op}[{variant}]" if variant else op
    return Case(id=f"{title}/{shape.dtype}/{name}", family="attention", tier=tier, check=ask, required=required)


_PAGED: tuple[tuple[str, Tier, Check], ...] = (
    ("decode", "boots", partial(_attends, DECODE)),
    ("prefill", "boots", partial(_attends, PREFILL)),
    ("chunks", "boots", partial(_attends, CHUNKS)),
    ("mixed", "boots", partial(_attends, MIXED)),
    ("verify", "boots", partial(_attends, VERIFY)),
    ("zero_rows", "boots", partial(_attends, ())),
    ("broken_rows", "boots", _broken),
    ("results_kept", "boots", _results_kept),
    ("batch_invariant", "boots", _batch_invariant),
    ("extremes", "serves", _extremes),
    ("strided_rows", "serves", _strided),
    ("deterministic", "serves", _deterministic),
    ("long", "serves", partial(_attends, LONG)),
)

_STEPS: tuple[tuple[str, Sequence[tuple[int, int]]], ...] = (
    ("decode", DECODE),
    ("mixed", MIXED),
    ("long", LONG),
    ("verify", VERIFY),
)

_VARIANTS: tuple[tuple[str, Tier, dict[str, Any]], ...] = (
    ("window", "serves", {"window": 24}),
    ("window=1", "full", {"window": 1}),
    ("one_kv_head", "serves", {"q_heads": 8, "kv_heads": 1}),
    ("no_groups", "serves", {"q_heads": 3, "kv_heads": 3}),
    ("head_dim=128", "serves", {"head_dim": 128}),
    ("softcap", "full", {"softcap": 2.0}),
    ("sinks", "full", {"sinks": True}),
    ("sinks,window", "full", {"sinks": True, "window": 24}),
)


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    for name, requests in (("prefill", PREFILL), ("decode", DECODE), ("chunks", CHUNKS), ("zero_rows", ())):
        yield _case("attention.write_kv", name, "boots", partial(_writes, requests), Shape(dtype=dtype))
    yield _case("attention.write_kv", "rewritten", "boots", _rewrites, Shape(dtype=dtype))
    for name, tier, check in _PAGED:
        yield _case("attention.paged", name, tier, check, Shape(dtype=dtype))
    for variant, tier, changes in _VARIANTS:
        shape = Shape(dtype=dtype, **changes)
        for name, step in _STEPS:
            required = variant not in ("softcap", "sinks", "sinks,window", "window=1")
            yield _case("attention.paged", name, tier, partial(_attends, step), shape, variant, required)
    for other in other_dtypes(dtype):
        shape = Shape(dtype=other)
        yield _case("attention.write_kv", "prefill", "serves", partial(_writes, PREFILL), shape, required=False)
        for name, step in _STEPS[:2]:
            yield _case("attention.paged", name, "serves", partial(_attends, step), shape, required=False)
