"""Paged attention with its cache under test, beside the definition in float64."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    CacheEntry,
    CacheGroupSpec,
    PagedAttentionRequest,
    WriteKVRequest,
)
from deepinfer_core.conformance.compare import check_close, check_form
from deepinfer_core.conformance.memory import check_fresh, check_guards, guard, poisoned_allocations
from deepinfer_core.conformance.target import Chosen, Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding, unit_roundoff

from .caches import Group, check_unchanged, open_group, snapshot
from .operation import generator, normal, widened
from .steps import Step


@attrs.frozen(kw_only=True)
class Shape:
    """Heads, and which of the optional terms are on. ``kept``: dtype of the cache, or ``""`` for ``dtype``."""

    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    causal: bool = True
    kept: str = ""

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
        entries = tuple(CacheEntry(name, (s.kv_heads, s.head_dim), s.kept or s.dtype) for name in ("key", "value"))
        group = CacheGroupSpec(name="kv", layers=1, entries=entries, **_window(s.window))
        self.group = open_group(target, group, step.num_blocks, step.block_size)
        common: dict[str, Any] = {
            "cache_group": "kv",
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "dtype": s.dtype,
            "cache_dtype": s.kept or s.dtype,
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
            causal=s.causal,
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
        key, value = (self._kept(x).double() for x in self.kv())
        oracle.run(key, value, self.group.oracle, self.step.whole().layout())

    def _kept(self, x: torch.Tensor) -> torch.Tensor:
        """What a cache in FP8 holds of these, by the contract: the nearest number of the format, 448 at most."""
        if self.shape.kept != "float8_e4m3fn":
            return x
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

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
        longest = (
            self._kept(self.key).double().nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1).amax()
            if len(self.key)
            else 0.0
        )
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
