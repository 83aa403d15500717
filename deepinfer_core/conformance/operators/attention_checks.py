"""What is asked of paged attention and of the writing of its cache, over every shape of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import CapturesGraphs, StepLayout
from deepinfer_core.conformance.case import Case, Mismatch, NotApplicable, Tier
from deepinfer_core.conformance.compare import check_close, check_equal
from deepinfer_core.conformance.memory import check_guards, guard
from deepinfer_core.conformance.target import MAX_LENGTH, Chosen, Target

from .attention import Paged, Shape, write
from .caches import check_rows, snapshot
from .listing import other_dtypes
from .operation import generator
from .steps import CHUNKS, DECODE, LONG, MIXED, PREFILL, VERIFY, make_step

Check = Callable[[Target, Shape], str]


def attends(requests: Sequence[tuple[int, int]], target: Target, shape: Shape) -> Chosen:
    """Attend over these ``(new rows, tokens of context)`` and hold the result to the definition."""
    step = make_step(requests, generator(str(requests)), window=shape.window)
    paged = Paged(target, shape, step, f"{shape} {requests}")
    paged.check()
    return paged.paged


def _attends(requests: Sequence[tuple[int, int]], target: Target, shape: Shape) -> str:
    return attends(requests, target, shape).label


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


def _graph_capture(target: Target, shape: Shape) -> str:
    """A recorded decode step, replayed with other contexts: host numbers are bounds, as the contract says."""
    steps = [make_step([(1, c) for c in contexts], generator("graph"), window=shape.window) for contexts in GRAPHS]
    pool = max(steps, key=lambda step: step.num_blocks)
    paged = [Paged(target, shape, attrs.evolve(s, num_blocks=pool.num_blocks), f"{shape} {s.contexts}") for s in steps]
    _claims(paged[0], "graph_capture")
    device, op = target.device, paged[0].paged.operator
    if not isinstance(device, CapturesGraphs):
        raise NotApplicable("this device records no graphs, so the cap cannot be proved")
    cache = paged[0].group.cache
    static = target.work(lambda: _bounded(steps[0].layout(target.put), target.put))
    query = target.work(lambda: target.put(paged[0].query))
    sinks = target.work(lambda: [target.put(given) for given in (paged[0].sinks,) if given is not None])
    paged[0].fill()
    graph = target.work(lambda: device.capture(lambda: op.run(query, cache, op.plan(static), *sinks)))
    for number, one in enumerate(paged[1:], start=1):
        one.fill()
        contents = one.group.cache

        def replay(one: Paged = one, contents: Any = contents) -> torch.Tensor:
            for name, tensor in cache.items():
                tensor.copy_(contents[name])
            layout = _bounded(one.step.layout(target.put), target.put)
            for name in ("seq_lens", "positions", "block_table", "slot_mapping"):
                getattr(static, name).copy_(getattr(layout, name))
            query.copy_(target.put(one.query))
            if sinks and one.sinks is not None:
                sinks[0].copy_(target.put(one.sinks))
            output: torch.Tensor = graph.replay()
            return output

        expected, bound = one.expected()
        where = f"{one.label}, replay {number} of a recorded decode step"
        check_close(where, target.get(target.work(replay)), expected, bound)
    return paged[0].paged.label


GRAPHS = ((20, 3, 40), (5, 31, 17), (64, 1, 2))
"""Contexts of the recorded step and of those it is replayed for."""


def _bounded(layout: StepLayout, put: Callable[[torch.Tensor], torch.Tensor]) -> StepLayout:
    """As for a recorded step: block tables of full width, host numbers that only bound."""
    rows = len(layout.host_query_lens)
    table = torch.zeros((rows, MAX_LENGTH // layout.block_size), dtype=torch.int32)
    wide = put(table)
    wide[:, : layout.block_table.shape[1]] = layout.block_table
    return attrs.evolve(
        layout,
        block_table=wide,
        host_seq_lens=np.full(rows, MAX_LENGTH, dtype=np.int32),
        max_seq_len=MAX_LENGTH,
    )


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
    try:
        paged.check()
    except Mismatch as error:
        raise Mismatch(f"attention.write_kv by {paged.write.label}, rows written twice: {error}") from error
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
    ("graph_capture", "boots", _graph_capture),
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
    ("block", "full", {"causal": False}),
    ("fp8_cache", "full", {"kept": "float8_e4m3fn"}),
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
            required = variant not in ("softcap", "sinks", "sinks,window", "window=1", "block", "fp8_cache")
            yield _case("attention.paged", name, tier, partial(_attends, step), shape, variant, required)
    for other in other_dtypes(dtype):
        shape = Shape(dtype=other)
        yield _case("attention.write_kv", "prefill", "serves", partial(_writes, PREFILL), shape, required=False)
        for name, step in _STEPS[:2]:
            yield _case("attention.paged", name, "serves", partial(_attends, step), shape, required=False)
