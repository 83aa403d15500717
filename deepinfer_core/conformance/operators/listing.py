"""From an operation and its checks to named cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from deepinfer_core.conformance.case import Case, Tier
from deepinfer_core.conformance.target import Target

from .checks import (
    LARGEST,
    ODD,
    Check,
    accuracy,
    batch_invariant,
    broken_rows,
    deterministic,
    extremes,
    results_kept,
    session,
    strided_rows,
    zero_rows,
)
from .graphs import graph_capture
from .operation import Operation

CHECKS: tuple[tuple[str, Tier, Check], ...] = (
    ("odd_rows", "boots", accuracy(ODD)),
    ("one_row", "boots", accuracy(1)),
    ("zero_rows", "boots", zero_rows),
    ("broken_rows", "boots", broken_rows),
    ("results_kept", "boots", results_kept),
    ("batch_invariant", "boots", batch_invariant),
    ("graph_capture", "boots", graph_capture),
    ("deterministic", "serves", deterministic),
    ("largest_rows", "serves", accuracy(LARGEST)),
    ("extremes", "serves", extremes),
    ("strided_rows", "serves", strided_rows),
)
"""Name, lowest tier and check of everything that is asked of a row-wise operator in its backend's own dtype."""

Make = Callable[[], Operation]


def operation_cases(
    make: Make,
    *,
    dtype: str,
    tier: Tier = "boots",
    required: bool = True,
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
) -> Iterator[Case]:
    """The cases of one operation.

    Args:
        make: a fresh operation.
        dtype: shown in the name.
        tier: the lowest tier; checks of a higher one keep theirs.
        required: in ``tier``, refusing the request is a failure.
        only, without: names of checks.
    """
    name = make().name
    order = ("boots", "serves", "full")
    for check_name, check_tier, check in CHECKS:
        if (only is not None and check_name not in only) or check_name in without:
            continue
        yield Case(
            id=f"{name}/{dtype}/{check_name}",
            family=name.partition(".")[0],
            tier=max(tier, check_tier, key=order.index),
            check=_asking(make, check),
            required=required,
        )


def _asking(make: Make, check: Check) -> Callable[[Target], str]:
    def ask(target: Target) -> str:
        asked = session(target, make())
        check(asked)
        return asked.chosen.label

    return ask


def other_dtypes(own: str) -> tuple[str, ...]:
    """The dtypes beside a backend's own that it may serve."""
    return tuple(name for name in ("float32", "bfloat16", "float16") if name != own)
