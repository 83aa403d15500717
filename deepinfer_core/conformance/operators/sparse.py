"""Sparse attention and the choice of entries: a window of raw rows beside pooled entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, IndexTopKRequest, SparseAttentionRequest
from deepinfer_core.conformance.case import Case, Mismatch, NotApplicable
from deepinfer_core.conformance.compare import check_close, check_equal, check_form
from deepinfer_core.conformance.memory import check_fresh, check_guards, guard, poisoned_allocations
from deepinfer_core.conformance.target import Chosen, Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding, unit_roundoff

from .caches import PAGED, Group, check_rows, check_unchanged, open_group, snapshot
from .listing import other_dtypes
from .operation import generator, normal, widened
from .steps import CHUNKS, DECODE, LONG, MIXED, PREFILL, VERIFY, Step, make_step

HEADS, DIM, WINDOW, RATE, CHOSEN = 4, 64, 24, 4, 5


@attrs.frozen(kw_only=True)
class Kind:
    """What a query sees beside the window: nothing, every visible entry, or chosen ones."""

    dtype: str = "float32"
    rate: int = 0
    chosen: int = 0
    causal: bool = True


class Sparse:
    """A sparse attention operator with its two groups; the window's rows are written by its own ``write``."""

    def __init__(self, target: Target, kind: Kind, step: Step, seed: str) -> None:
        self.target, self.kind, self.step = target, kind, step
        draw, dtype = generator(seed), getattr(torch, kind.dtype)
        entry = (CacheEntry("kv", (DIM,), kind.dtype),)
        window = CacheGroupSpec(name="window", kind="window", window=WINDOW, layers=1, entries=entry)
        self.window = open_group(target, window, step.num_blocks, step.block_size)
        self.entries: Group | None = None
        if kind.rate:
            spec = CacheGroupSpec(name="entries", layers=1, entries=entry, tokens_per_row=kind.rate)
            self.entries = open_group(target, spec, step.num_blocks, step.block_size)
        self.request = SparseAttentionRequest(
            cache_group="window",
            entry_group="entries" if kind.rate else "",
            heads=HEADS,
            head_dim=DIM,
            dtype=kind.dtype,
            cache_dtype=kind.dtype,
            scale=DIM**-0.5,
            block_size=step.block_size,
            window=WINDOW,
            rate=kind.rate,
            chosen=kind.chosen,
            causal=kind.causal,
            device_type=target.device.info.type,
            demands={group.demand for group in (self.window, self.entries) if group is not None},
        )
        self.op: Chosen = target.choose(self.request)
        self.label = f"attention.sparse by {self.op.label}"
        self.kv = normal(draw, sum(step.contexts), DIM, dtype=dtype)
        self.pooled = normal(draw, sum(c // kind.rate for c in step.contexts) if kind.rate else 0, DIM, dtype=dtype)
        self.query = normal(draw, step.rows, HEADS, DIM, dtype=dtype)
        self.sinks = normal(draw, HEADS)
        self.chosen = chosen_entries(step, kind.rate, kind.chosen, draw) if kind.chosen else None

    def fill(self) -> None:
        """Write all tokens, as a prefill does, and put the entries where they belong."""
        whole = self.step.whole()
        operator, cache = self.op.operator, self.window.cache
        before = snapshot(self.target, cache)
        self.target.work(lambda: operator.write(self.target.put(self.kv), cache, whole.layout(self.target.put)))
        check_rows(f"{self.label}, write", self.window, before, snapshot(self.target, cache), whole.slots)
        self.target.oracle(widened(self.request)).write(self.kv.double(), self.window.oracle, whole.layout())
        if self.entries is not None:
            put_entries(self.target, self.entries, "kv", entry_rows(self.step, self.kind.rate), self.pooled)

    def run(self, request: int | None = None, *, wide_rows: int = 0) -> torch.Tensor:
        """Attend for the whole step, or for one of its requests alone."""
        target, entries = self.target, self.entries
        step = self.step if request is None else self.step.alone(request)
        rows = slice(None) if request is None else self.step.rows_of(request)
        query = self.query[rows]
        before = snapshot(target, self.window.cache)

        def work() -> tuple[torch.Tensor, dict[str, Any]]:
            kept = {"query": guard(query, target.put, wide_rows=wide_rows), "sinks": guard(self.sinks, target.put)}
            if self.chosen is not None:
                kept["chosen"] = guard(self.chosen[rows], target.put)
            layout = step.layout(target.put)
            # Entries have no window: nothing of theirs slides out.
            whole = attrs.evolve(step, drop=(0,) * len(step.drop)).layout(target.put)
            plan = self.op.operator.plan(layout, whole) if entries is not None else self.op.operator.plan(layout)
            more = (kept["chosen"].tensor,) if self.chosen is not None else ()
            cache = None if entries is None else entries.cache
            output = self.op.operator.run(
                kept["query"].tensor, self.window.cache, cache, plan, kept["sinks"].tensor, *more
            )
            return output, kept

        with poisoned_allocations():
            output, kept = target.work(work)
        check_form(self.label, output, tuple(query.shape), query.dtype)
        check_guards(self.label, kept, frozenset(), target.get)
        check_fresh(self.label, {"output": output}, kept, frozenset())
        check_unchanged(self.label, before, snapshot(target, self.window.cache))
        return target.get(output)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As for paged attention; the magnitudes of the values are found by attending with a constant channel's help:
        keys and values are one here, so the weights' sum of magnitudes is bounded by the longest value seen."""
        op = self.target.oracle(widened(self.request))
        whole = attrs.evolve(self.step, drop=(0,) * len(self.step.drop)).layout()
        plan = op.plan(self.step.layout(), whole) if self.entries is not None else op.plan(self.step.layout())
        cache = None if self.entries is None else self.entries.oracle
        more = (self.chosen,) if self.chosen is not None else ()
        output = op.run(self.query.double(), self.window.oracle, cache, plan, self.sinks.double(), *more)
        rows = torch.cat((self.kv, self.pooled)).double().nan_to_num(posinf=0.0, neginf=0.0)
        longest, largest = (rows.norm(dim=-1).amax(), rows.abs().amax(0)) if len(rows) else (0.0, torch.zeros(DIM))
        score = self.request.scale * self.query.double().nan_to_num().norm(dim=-1, keepdim=True) * longest
        delta = (gamma(DIM) + FUNCTION * U32) * score
        relative = torch.expm1(2 * delta) + gamma(max(self.step.contexts, default=0)) + FUNCTION * U32
        relative = relative + unit_roundoff(self.query.dtype)
        return output, relative * largest + rounding(output, self.query.dtype)

    def check(self, **options: Any) -> str:
        self.fill()
        output = self.run(**options)
        expected, bound = self.expected()
        check_close(self.label, output, expected, bound)
        return self.op.label


def chosen_entries(step: Step, rate: int, count: int, draw: torch.Generator) -> torch.Tensor:
    """``[T, count]`` int64: visible ids of each row, ascending, -1 last; now and then fewer than there are."""
    rows = torch.full((step.rows, count), -1, dtype=torch.int64)
    for row, position in enumerate(step.positions.tolist()):
        visible = torch.randperm((position + 1) // rate, generator=draw)[: count - row % 2]
        rows[row, : len(visible)] = visible.sort().values
    return rows


def entry_rows(step: Step, rate: int) -> torch.Tensor:
    """Rows (``block * rows_per_block + row``) of every complete entry, request after request."""
    found = []
    per_block = step.block_size // rate
    for request, context in enumerate(step.contexts):
        entry = torch.arange(context // rate)
        found.append(step.table[request, entry // per_block].long() * per_block + entry % per_block)
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def put_entries(target: Target, group: Group, name: str, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Place entries in both caches. Only in the defined layout: others are reached through ``attention.compress``.

    Raises:
        NotApplicable: the backend has a layout of its own.
    """
    if group.layout != PAGED:
        raise NotApplicable(f"entries lie in layout {group.layout!r}, whose form is the backend's own")

    def work() -> None:
        group.cache[name].view(-1, values.shape[-1])[target.put(rows)] = target.put(values)

    target.work(work)
    group.oracle[name].view(-1, values.shape[-1])[rows] = values.double()


def _attends(requests: Sequence[tuple[int, int]], kind: Kind, wide_rows: int, target: Target) -> str:
    step = make_step(requests, generator(str(requests)), window=WINDOW + (not kind.causal))
    return Sparse(target, kind, step, f"{kind} {requests}").check(wide_rows=wide_rows)


def _broken(kind: Kind, target: Target) -> str:
    """One request whose rows are NaN: the others do not notice."""
    step = make_step(((1, 20), (1, 33), (3, 19)), generator("broken"), window=WINDOW)
    sparse = Sparse(target, kind, step, f"{kind} broken")
    sparse.query[1], sparse.kv[20:53] = float("nan"), float("nan")
    sparse.fill()
    output = sparse.run()
    expected, bound = sparse.expected()
    keep = torch.tensor([0, 2, 3, 4])
    check_close(f"{sparse.label}, beside a request of NaN", output[keep], expected[keep], bound[keep])
    if output[1].isfinite().all():
        raise Mismatch(f"{sparse.label}, row 1: found finite values, expected the NaN of its query to show")
    return sparse.op.label


def _batch_invariant(kind: Kind, target: Target) -> str:
    """Bitwise the same for a request alone and among others."""
    sparse = Sparse(target, kind, make_step(MIXED, generator("invariant"), window=WINDOW), f"{kind} invariant")
    _claims(sparse.op, "batch_invariant")
    sparse.fill()
    whole = sparse.run()
    for request in range(len(sparse.step.queries)):
        rows = sparse.step.rows_of(request)
        check_equal(f"{sparse.label}, request {request} alone", sparse.run(request), whole[rows], "as among the others")
    return sparse.op.label


def _deterministic(kind: Kind, target: Target) -> str:
    sparse = Sparse(target, kind, make_step(LONG, generator("again"), window=WINDOW), f"{kind} again")
    _claims(sparse.op, "deterministic")
    sparse.fill()
    first = sparse.run()
    for _ in range(3):
        check_equal(f"{sparse.label}, repeated", sparse.run(), first, "as the first time")
    return sparse.op.label


def _claims(chosen: Chosen, cap: str) -> None:
    if cap not in chosen.provider.caps:
        raise NotApplicable(f"{chosen.label} does not claim {cap}")


def _top_k(requests: Sequence[tuple[int, int]], ties: bool, broken: bool, target: Target, dtype: str) -> str:
    """Entries by score descending, then id ascending; a NaN loses to all; stored ascending, -1 last."""
    draw = generator(f"top_k {requests} {ties} {broken}")
    step, heads, dim = make_step(requests, draw), 8, 64
    spec = CacheGroupSpec(name="index", layers=1, entries=(CacheEntry("key", (dim,), dtype),), tokens_per_row=RATE)
    group = open_group(target, spec, step.num_blocks, step.block_size)
    request = IndexTopKRequest(
        cache_group="index",
        heads=heads,
        head_dim=dim,
        top_k=CHOSEN,
        rate=RATE,
        dtype=dtype,
        cache_dtype=dtype,
        scale=dim**-0.5,
        block_size=step.block_size,
        device_type=target.device.info.type,
        demands={group.demand},
    )
    op = target.choose(request)
    rows = entry_rows(step, RATE)
    # Small whole numbers: every score is exact, so that ties are ties and the choice is the definition's.
    high = 2 if ties else 40
    keys = torch.randint(-high, high + 1, (len(rows), dim), generator=draw).to(getattr(torch, dtype))
    if broken and len(keys) > 3:
        keys[2] = float("nan")
    query = torch.randint(-2, 3, (step.rows, heads, dim), generator=draw).to(keys.dtype)
    weights = torch.randint(-1, 3, (step.rows, heads), generator=draw).float()
    put_entries(target, group, "key", rows, keys)
    label = f"attention.index_topk by {op.label}"

    def work() -> tuple[torch.Tensor, dict[str, Any]]:
        kept = {"query": guard(query, target.put), "weights": guard(weights, target.put)}
        plan = op.operator.plan(step.layout(target.put))
        return op.operator.run(kept["query"].tensor, kept["weights"].tensor, group.cache, plan), kept

    with poisoned_allocations():
        found, kept = target.work(work)
    check_form(label, found, (step.rows, CHOSEN), torch.int64)
    check_guards(label, kept, frozenset(), target.get)
    oracle = target.oracle(widened(request))
    expected = oracle.run(query.double(), weights.double(), group.oracle, oracle.plan(step.layout()))
    check_equal(label, target.get(found), expected)
    return op.label


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    steps = (
        ("decode", DECODE),
        ("prefill", PREFILL),
        ("chunks", CHUNKS),
        ("mixed", MIXED),
        ("long", LONG),
        ("zero_rows", ()),
        ("verify", VERIFY),
    )
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("window", {}),
        ("entries", {"rate": RATE}),
        ("chosen", {"rate": RATE, "chosen": CHOSEN}),
    )

    def case(name: str, check: Callable[[Target], str], required: bool = True) -> Case:
        return Case(id=name, family="attention", tier="full", check=check, required=required)

    for variant, fields in kinds:
        kind = Kind(dtype=dtype, **fields)
        title = f"attention.sparse[{variant}]/{dtype}"
        for name, requests in steps:
            yield case(f"{title}/{name}", partial(_attends, requests, kind, 0))
        yield case(f"{title}/broken_rows", partial(_broken, kind))
        yield case(f"{title}/strided_rows", partial(_attends, MIXED, kind, 128))
        yield case(f"{title}/batch_invariant", partial(_batch_invariant, kind))
        yield case(f"{title}/deterministic", partial(_deterministic, kind))
    block = Kind(dtype=dtype, causal=False)
    yield case(f"attention.sparse[block]/{dtype}/verify", partial(_attends, VERIFY, block, 0), required=False)
    for other in other_dtypes(dtype):
        kind = Kind(dtype=other, rate=RATE)
        yield case(f"attention.sparse[entries]/{other}/mixed", partial(_attends, MIXED, kind, 0), required=False)
    for name, requests in steps:
        check = partial(_top_k, requests, False, False, dtype=dtype)
        yield case(f"attention.index_topk/{dtype}/{name}", check)
    yield case(f"attention.index_topk/{dtype}/ties", partial(_top_k, LONG, True, False, dtype=dtype))
    yield case(f"attention.index_topk/{dtype}/broken_rows", partial(_top_k, MIXED, False, True, dtype=dtype))
