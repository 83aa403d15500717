"""Pooling tokens into entries: the same entries, however the tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, CompressRequest
from deepinfer_core.conformance.case import Case, NotApplicable
from deepinfer_core.conformance.compare import check_close, check_equal
from deepinfer_core.conformance.memory import check_guards, guard, poisoned_allocations
from deepinfer_core.conformance.target import Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding, unit_roundoff

from .caches import PAGED, check_rows, open_group, snapshot
from .operation import generator, normal, widened
from .rotary import TURNS
from .sparse import entry_rows
from .steps import Step, make_step

DIM, ROTARY, RATE = 64, 16, 4
ONE_STEP: tuple[tuple[int, int], ...] = ((33, 33), (7, 7), (16, 16), (3, 3))
TOKEN_BY_TOKEN, UNEVEN = (1,) * 41, (5, 1, 2, 3, 13, 1, 1, 9)


class Compress:
    """A pooling operator with its tail rows and entries."""

    def __init__(self, target: Target, step: Step, dtype: str, overlap: bool, qdq: str, seed: str) -> None:
        self.target, self.step = target, step
        width = DIM * (2 if overlap else 1)
        window = RATE * (2 if overlap else 1)
        tail = tuple(CacheEntry(name, (width,), "float32") for name in ("value", "score"))
        entry = (CacheEntry("kv", (DIM,), dtype),)
        self.tail = open_group(
            target,
            CacheGroupSpec(name="tail", kind="window", window=window, layers=1, entries=tail),
            step.num_blocks,
            step.block_size,
        )
        self.entries = open_group(
            target,
            CacheGroupSpec(name="entries", layers=1, entries=entry, tokens_per_row=RATE),
            step.num_blocks,
            step.block_size,
        )
        self.request = CompressRequest(
            cache_group="tail",
            entry_group="entries",
            entry="kv",
            head_dim=DIM,
            rate=RATE,
            overlap=overlap,
            dtype=dtype,
            cache_dtype=dtype,
            eps=1e-6,
            rotary_dim=ROTARY,
            theta=10000.0,
            max_positions=4096,
            qdq=qdq,
            qdq_channels=DIM - ROTARY if qdq else 0,
            qdq_group=16 if qdq else 0,
            block_size=step.block_size,
            device_type=target.device.info.type,
            demands={self.tail.demand, self.entries.demand},
        )
        self.op = target.choose(self.request)
        self.label = f"attention.compress by {self.op.label}"
        draw, tokens = generator(seed), sum(step.contexts)
        self.value, self.gate = normal(draw, tokens, width), normal(draw, tokens, width, scale=2.0)
        self.bias = normal(draw, RATE, width)
        self.norm = normal(draw, DIM, dtype=getattr(torch, dtype))

    def run(self, step: Step, rows: torch.Tensor) -> None:
        """One step of the operator under test and of the definition; only rows of the step change."""
        target, op = self.target, self.op.operator
        before = [snapshot(target, group.cache) for group in (self.tail, self.entries)]
        value, gate = self.value[rows], self.gate[rows]

        def work() -> dict[str, Any]:
            kept = {
                name: guard(tensor, target.put, wide_rows=64 if name in ("value", "gate") else 0)
                for name, tensor in (("value", value), ("gate", gate), ("bias", self.bias), ("norm", self.norm))
            }
            layout = step.layout(target.put)
            op.run(
                kept["value"].tensor,
                kept["gate"].tensor,
                self.tail.cache,
                self.entries.cache,
                op.plan(layout, layout),
                kept["bias"].tensor,
                kept["norm"].tensor,
            )
            return kept

        with poisoned_allocations():
            kept = target.work(work)
        check_guards(self.label, kept, frozenset(), target.get)
        after = [snapshot(target, group.cache) for group in (self.tail, self.entries)]
        closing = (step.positions + 1) % RATE == 0
        check_rows(f"{self.label}, tail", self.tail, before[0], after[0], step.slots)
        check_rows(f"{self.label}, entries", self.entries, before[1], after[1], step.slots[closing] // RATE)
        oracle = target.oracle(self._wide())
        oracle.run(
            value.double(),
            gate.double(),
            self.tail.oracle,
            self.entries.oracle,
            oracle.plan(step.layout(), step.layout()),
            self.bias.double(),
            self.norm.double(),
        )

    def _wide(self) -> Any:
        """The definition without the rounding of a packed cache, which is compared apart."""
        return widened(attrs.evolve(self.request, qdq="", qdq_channels=0, qdq_group=0))

    def compare(self) -> None:
        """Hold every entry to the definition.

        A weight is off by what its score is, twice (softmax); the pooled value is rounded to ``dtype``, normed and
        turned, which passes relative errors on. A packed cache rounds by half a step, an eighth of the value for three
        bits of mantissa and of the group's scale besides.
        """
        if self.entries.layout != PAGED:
            raise NotApplicable(f"entries lie in layout {self.entries.layout!r}, whose form is the backend's own")
        rows = entry_rows(self.step, RATE)
        if len(rows) == 0:
            return
        found = snapshot(self.target, self.entries.cache)["kv"].flatten(0, 1)[rows]
        expected = self.entries.oracle["kv"].flatten(0, 1)[rows]
        own = unit_roundoff(found.dtype)
        values = float(self.value.abs().nan_to_num().amax())
        scores = float((self.gate.abs().nan_to_num().amax()) + self.bias.abs().amax())
        pooled = values * ((FUNCTION + 4 * scores) * U32 + gamma(2 * RATE) + own)
        weight = float(self.norm.double().abs().amax())
        # The mean square of a pooled entry of normal values is near 1/3; its smallest, over 64 channels, above 1/16.
        normed = weight * 4 * pooled * 2 + (gamma(DIM) + FUNCTION * U32) * expected.abs().amax(-1, keepdim=True)
        turned = 2 * normed + expected.abs().amax(-1, keepdim=True) * (TURNS * U32 * max(self.step.contexts) + 3 * own)
        bound = turned + rounding(expected, found.dtype)
        if self.request.qdq:
            bound = bound + expected.abs().amax(-1, keepdim=True) / 8
        check_close(f"{self.label}, entries", found, expected, bound)


def _one_step(requests: Sequence[tuple[int, int]], dtype: str, overlap: bool, qdq: str, target: Target) -> str:
    step = make_step(requests, generator(str(requests)))
    compress = Compress(target, step, dtype, overlap, qdq, f"{requests} {overlap}")
    compress.run(step, torch.arange(step.rows))
    compress.compare()
    return compress.op.label


def _in_cuts(cuts: Sequence[int], dtype: str, overlap: bool, target: Target) -> str:
    """Two requests side by side in steps of these lengths: entries as from one step, to the bit where claimed."""
    total = sum(cuts)
    whole = make_step(((total, total), (total, total)), generator("cuts"))
    compress = Compress(target, whole, dtype, overlap, "", f"cuts {overlap}")
    done = 0
    for count in cuts:
        done += count
        step = attrs.evolve(whole, queries=(count, count), contexts=(done, done))
        rows = torch.cat([torch.arange(done - count, done), torch.arange(total + done - count, total + done)])
        compress.run(step, rows)
    compress.compare()
    return compress.op.label


def _batch_invariant(dtype: str, target: Target) -> str:
    """Bitwise the same entries from one step and from many, beside another request and without it."""
    total = sum(UNEVEN)
    whole = make_step(((total, total), (7, 7)), generator("invariant"))
    at_once = Compress(target, whole, dtype, True, "", "invariant")
    if "batch_invariant" not in at_once.op.provider.caps:
        raise NotApplicable(f"{at_once.op.label} does not claim batch_invariant")
    at_once.run(whole, torch.arange(whole.rows))
    in_cuts, done = Compress(target, whole, dtype, True, "", "invariant"), 0
    for count in UNEVEN:
        done += count
        step = attrs.evolve(whole.alone(0), queries=(count,), contexts=(done,))
        in_cuts.run(step, torch.arange(done - count, done))
    if at_once.entries.layout != PAGED:
        raise NotApplicable(f"entries lie in layout {at_once.entries.layout!r}, whose form is the backend's own")
    rows = entry_rows(whole.alone(0), RATE)
    found, expected = (snapshot(target, c.entries.cache)["kv"].flatten(0, 1)[rows] for c in (in_cuts, at_once))
    check_equal(f"{at_once.label}, entries of a request in steps of its own", found, expected, "as in one step")
    return at_once.op.label


def _rewritten(dtype: str, target: Target) -> str:
    """Rows of rejected drafts, written again with other values: nothing of them is left in the entries."""
    step = make_step(((30, 30),), generator("rewritten"))
    compress = Compress(target, step, dtype, True, "", "rewritten")
    compress.run(attrs.evolve(step, queries=(22,), contexts=(22,)), torch.arange(22))
    kept = compress.value.clone()
    compress.value = -3 * compress.value
    compress.run(attrs.evolve(step, queries=(6,), contexts=(28,)), torch.arange(22, 28))
    compress.value = kept
    compress.run(attrs.evolve(step, queries=(8,), contexts=(30,)), torch.arange(22, 30))
    compress.compare()
    return compress.op.label


def _broken(dtype: str, target: Target) -> str:
    """A request of NaN leaves its neighbour's entries as they are."""
    step = make_step(((16, 16), (16, 16)), generator("broken"))
    clean = Compress(target, step, dtype, True, "", "broken")
    clean.run(step, torch.arange(32))
    broken = Compress(target, step, dtype, True, "", "broken")
    broken.value[16:] = float("nan")
    broken.run(step, torch.arange(32))
    if broken.entries.layout != PAGED:
        raise NotApplicable(f"entries lie in layout {broken.entries.layout!r}, whose form is the backend's own")
    rows = entry_rows(step.alone(0), RATE)
    found, expected = (snapshot(target, c.entries.cache)["kv"].flatten(0, 1)[rows] for c in (broken, clean))
    check_equal(f"{broken.label}, entries beside a request of NaN", found, expected, "as without it")
    return broken.op.label


def cases(dtype: str) -> Iterator[Case]:
    """Every case of this operator."""
    for overlap, title in ((False, "attention.compress"), (True, "attention.compress[overlap]")):
        for name, requests in (("prefill", ONE_STEP), ("one_row", ((1, 1),)), ("zero_rows", ())):
            check: Any = partial(_one_step, requests, dtype, overlap, "")
            yield _case(f"{title}/{dtype}/{name}", check)
        for name, cuts in (("token_by_token", TOKEN_BY_TOKEN), ("uneven_steps", UNEVEN)):
            yield _case(f"{title}/{dtype}/{name}", partial(_in_cuts, cuts, dtype, overlap))
    yield _case(f"attention.compress[overlap]/{dtype}/rewritten", partial(_rewritten, dtype))
    yield _case(f"attention.compress[overlap]/{dtype}/broken_rows", partial(_broken, dtype))
    yield _case(f"attention.compress[overlap]/{dtype}/batch_invariant", partial(_batch_invariant, dtype))
    yield _case(f"attention.compress[fp8]/{dtype}/prefill", partial(_one_step, ONE_STEP, dtype, True, "fp8:e4m3"))


def _case(name: str, check: Any) -> Case:
    return Case(id=name, family="attention", tier="full", check=check, required=True)
