"""Cases that nobody wrote down: requests drawn by hypothesis from what the backend's own providers say they take.

A drawn request that only a reference operator would serve is passed over: the grid holds those already. What fails is
shrunk to the simplest request that still fails, and named in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from deepinfer_core.conformance.case import Case, NotApplicable, Refused, Tier
from deepinfer_core.conformance.target import REFERENCE, Target

from .attention import Shape
from .attention_checks import attends
from .checks import accuracy, batch_invariant, session
from .draw import Draw
from .gemm import BatchedLinear, GroupedLinear, Linear
from .hyper_connection import HyperConnection, HyperHead
from .moe import Route
from .operation import Operation
from .pointwise import AddRmsNorm, HeadNorm, RmsNorm, Swiglu
from .quantise import QuantiseDequantise
from .rotary import LINEAR, LLAMA3, YARN, Embedding, Rope

EXAMPLES = 25
"""Drawn requests of a case."""

PARTS = 8
"""Cases for each operator in tier *full*, beside the one of *serves*: parts that several processes can share. Drawn
requests have few kernels in common, so on a device that compiles them they take the longest."""

Ask = Callable[[Any, Target], bool]
"""``(hypothesis' data, target)``: draw a request and ask it; False when the backend has no own provider for it."""


def _operation(draw_operation: Callable[[Any, Any], Operation], data: Any, target: Target) -> bool:
    from hypothesis import strategies as st

    operation = draw_operation(st, data.draw)
    operation.told = f", drawn request {operation.request}"
    asked = session(target, operation)
    if not (asked.chosen.own or target.backend == REFERENCE):
        return False
    rows = data.draw(st.integers(0, 40))
    accuracy(rows)(asked)
    if "batch_invariant" in asked.chosen.provider.caps:
        batch_invariant(asked)
    return True


def _dtype(st: Any, draw: Any) -> str:
    dtype: str = draw(st.sampled_from(("float32", "bfloat16", "float16")))
    return dtype


def _rms_norm(st: Any, draw: Any) -> Operation:
    kind = draw(st.sampled_from((RmsNorm, AddRmsNorm, HeadNorm)))
    made: Operation = kind(_dtype(st, draw), draw(st.integers(1, 700)), draw(st.sampled_from((1e-6, 1e-5, 1e-3))))
    return made


def _swiglu(st: Any, draw: Any) -> Operation:
    return Swiglu(_dtype(st, draw), draw(st.integers(1, 400)), draw(st.none() | st.floats(0.5, 10.0)))


def _rope(st: Any, draw: Any) -> Operation:
    head_dim = 2 * draw(st.integers(2, 80))
    return Rope(
        _dtype(st, draw),
        inverse=draw(st.booleans()),
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(2, head_dim // 2)),
        theta=draw(st.sampled_from((10000.0, 160000.0, 1000000.0))),
        interleaved=draw(st.booleans()),
        trailing=draw(st.booleans()),
        scaling=draw(st.sampled_from(({}, LINEAR, LLAMA3, YARN))),
    )


def _embedding(st: Any, draw: Any) -> Operation:
    return Embedding(_dtype(st, draw), draw(st.integers(2, 2000)), draw(st.integers(1, 300)))


def _linear(st: Any, draw: Any) -> Operation:
    shape = (draw(st.integers(1, 600)), draw(st.integers(1, 600)))
    bias, parts = draw(st.booleans()), draw(st.integers(1, 3))
    dtype = _dtype(st, draw)
    return Linear(dtype, shape, bias=bias, parts=parts, out_dtype=draw(st.sampled_from((dtype, "float32"))))


def _batched(st: Any, draw: Any) -> Operation:
    return BatchedLinear(_dtype(st, draw), (draw(st.integers(1, 200)), draw(st.integers(1, 200))))


def _grouped(st: Any, draw: Any) -> Operation:
    return GroupedLinear(_dtype(st, draw), (draw(st.integers(1, 200)), draw(st.integers(2, 200))))


def _hyper_connection(st: Any, draw: Any) -> Operation:
    sizes = (draw(st.integers(2, 6)), draw(st.integers(1, 200)))
    return HyperConnection(_dtype(st, draw), *sizes, iterations=draw(st.integers(1, 20)))


def _hyper_head(st: Any, draw: Any) -> Operation:
    return HyperHead(_dtype(st, draw), draw(st.integers(2, 6)), draw(st.integers(1, 200)))


def _quantise(st: Any, draw: Any) -> Operation:
    group = 2 ** draw(st.integers(3, 6))
    channels = group * draw(st.integers(1, 4))
    width = channels + draw(st.integers(0, 40))
    return QuantiseDequantise(_dtype(st, draw), draw(st.sampled_from(("fp8:e4m3", "fp4:e2m1"))), width, channels, group)


def _route(st: Any, draw: Any) -> Operation:
    experts = draw(st.integers(6, 40))
    return Route(
        draw(st.sampled_from(("softmax", "sigmoid", "sqrtsoftplus"))),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        given=draw(st.booleans()),
        normalise=draw(st.booleans()),
    )


def _draw_stage(st: Any, draw: Any) -> Operation:
    return Draw(draw(st.integers(40, 700)))


def _paged(data: Any, target: Target) -> bool:
    from hypothesis import strategies as st

    draw = data.draw
    kv_heads = draw(st.integers(1, 4))
    shape = Shape(
        q_heads=kv_heads * draw(st.sampled_from((1, 2, 3, 8))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((16, 32, 64, 80, 128))),
        dtype=_dtype(st, draw),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.floats(0.5, 30.0)),
        sinks=draw(st.booleans()),
    )
    request = st.integers(1, 20).flatmap(lambda new: st.tuples(st.just(new), st.integers(new, new + 60)))
    requests = tuple(draw(st.lists(request, max_size=5)))
    return attends(requests, target, shape).own or target.backend == REFERENCE


def ask_drawn(ask: Ask, part: int, target: Target) -> str:
    """Ask :data:`EXAMPLES` drawn requests, the same in every run and others in every part, and the simplest that fails.

    Returns:
        A note on how many were taken.
    """
    try:
        from hypothesis import HealthCheck, given, seed, settings
        from hypothesis import strategies as st
        from hypothesis.errors import Unsatisfiable
    except ImportError:
        raise NotApplicable("needs hypothesis: pip install 'deepinfer-core[conformance]'") from None
    taken = 0

    @seed(part)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        nonlocal taken
        try:
            taken += ask(data, target)
        except Refused:
            return

    try:
        run()
    except Unsatisfiable as error:
        raise NotApplicable(f"no request could be drawn: {error}") from error
    if not taken:
        raise NotApplicable("its own providers take none of the requests that were drawn")
    return f"{target.backend} {taken} of {EXAMPLES} drawn requests"


OPERATIONS: Mapping[str, Callable[[Any, Any], Operation]] = {
    "pointwise.rms_norm": _rms_norm,
    "pointwise.swiglu": _swiglu,
    "pointwise.rope": _rope,
    "pointwise.embedding": _embedding,
    "pointwise.hyper_connection": _hyper_connection,
    "pointwise.hyper_head": _hyper_head,
    "pointwise.quantise_dequantise": _quantise,
    "gemm.linear": _linear,
    "gemm.batched": _batched,
    "gemm.grouped": _grouped,
    "moe.route": _route,
    "sampling.stage[draw]": _draw_stage,
}


def cases(dtype: str) -> Iterator[Case]:
    """A case for each operator, and more of them in tier ``full``."""
    asks: dict[str, Ask] = {name: partial(_operation, draw) for name, draw in OPERATIONS.items()}
    asks["attention.paged"] = _paged
    tiers: list[Tier] = ["serves"]
    tiers += ["full"] * PARTS
    for name, ask in asks.items():
        for part, tier in enumerate(tiers):
            yield Case(
                id=f"{name}/any/{f'drawn_widely_{part}' if part else 'drawn'}",
                family=name.partition(".")[0],
                tier=tier,
                check=partial(ask_drawn, ask, part),
            )
