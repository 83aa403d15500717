"""The checks that every row-wise operator has to stand, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from deepinfer_core.conformance.case import Mismatch, NotApplicable
from deepinfer_core.conformance.compare import check_close, check_equal, check_form
from deepinfer_core.conformance.memory import (
    Guarded,
    check_fresh,
    check_guards,
    guard,
    poisoned_allocations,
    shares_memory,
)
from deepinfer_core.conformance.target import Chosen, Target

from .operation import Operation, Tensors, generator

ODD, MANY, LARGEST = 7, 64, 512
WIDE_ROWS = 192


@attrs.frozen(kw_only=True, eq=False)
class Session:
    """An operator that was built for a case, with its weights packed."""

    target: Target
    operation: Operation
    chosen: Chosen
    constants: Mapping[str, Any]
    weights: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.operation.name} by {self.chosen.label}{self.operation.told}"

    def call(self, inputs: Tensors, *, wide_rows: int = 0, poisoned: bool = False) -> dict[str, torch.Tensor]:
        """Run once with guarded inputs, check form, guards and freshness, and bring the outputs to the host."""
        outputs, guarded = self.launch(inputs, wide_rows=wide_rows, poisoned=poisoned)
        self.check_memory(outputs, guarded)
        return {name: self.target.get(output) for name, output in outputs.items()}

    def launch(
        self, inputs: Tensors, *, wide_rows: int = 0, poisoned: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Guarded]]:
        """Run once; outputs stay on the device."""
        target = self.target

        def work() -> tuple[dict[str, torch.Tensor], dict[str, Guarded]]:
            guarded = {name: guard(value, target.put, wide_rows=wide_rows) for name, value in inputs.items()}
            tensors = {name: one.tensor for name, one in guarded.items()}
            return dict(self.operation.call(self.chosen.operator, tensors, self.weights)), guarded

        if not poisoned:
            return target.work(work)
        with poisoned_allocations():
            return target.work(work)

    def check_memory(self, outputs: Tensors, guarded: Mapping[str, Guarded]) -> None:
        """Nothing outside was written, inputs are whole, outputs are the operator's own."""
        may = self.operation.overwritten
        check_guards(self.label, guarded, may, self.target.get)
        check_fresh(self.label, outputs, guarded, may)

    def check_forms(self, outputs: Tensors, expected: Tensors) -> None:
        dtypes = self.operation.dtypes()
        for name, value in expected.items():
            if name not in outputs:
                raise Mismatch(f"{self.label}: no output {name!r}")
            check_form(f"{self.label}, output {name!r}", outputs[name], tuple(value.shape), dtypes[name])

    def check_values(self, inputs: Tensors, outputs: Tensors) -> None:
        """Hold outputs (host) to the definition."""
        expected, bounds = self.operation.expected(self.target.oracle, inputs, self.constants)
        self.check_forms(outputs, expected)
        for name, value in expected.items():
            where = f"{self.label}, output {name!r}"
            if self.operation.exact:
                check_equal(where, outputs[name], value.to(outputs[name].dtype))
            else:
                check_close(where, outputs[name], value, bounds[name])


def session(target: Target, operation: Operation) -> Session:
    """Choose, build and pack. Raises Refused when no provider takes the request."""
    operation.request = attrs.evolve(operation.request, device_type=target.device.info.type)
    chosen = target.choose(operation.request)
    constants = operation.constants(generator(operation.name))
    weights = operation.prepare(chosen.operator, constants, target.put)
    return Session(target=target, operation=operation, chosen=chosen, constants=constants, weights=weights)


Check = Callable[[Session], None]


def accuracy(rows: int) -> Check:
    """Values of ``rows`` rows, with every allocation poisoned."""

    def check(s: Session) -> None:
        inputs = s.operation.sample(rows, generator(f"{s.operation.name} {rows}"))
        s.check_values(inputs, s.call(inputs, poisoned=True))

    return check


def zero_rows(s: Session) -> None:
    """No rows in, no rows out, of the right form."""
    accuracy(0)(s)


def extremes(s: Session) -> None:
    """Very large and very small magnitudes."""
    inputs = s.operation.extremes(ODD, generator(f"{s.operation.name} extremes"))
    if inputs is None:
        raise NotApplicable("the contract names no extreme magnitudes")
    s.check_values(inputs, s.call(inputs, poisoned=True))


def strided_rows(s: Session) -> None:
    """Rows that lie apart, as the parts of a merged projection do."""
    inputs = s.operation.sample(ODD, generator(f"{s.operation.name} strided"))
    s.check_values(inputs, s.call(inputs, wide_rows=WIDE_ROWS))


def broken_rows(s: Session) -> None:
    """A row of NaN, one with an inf and one with a -inf: they show it, and no other row changes."""
    inputs = dict(s.operation.sample(ODD, generator(f"{s.operation.name} broken")))
    if not any(value.is_floating_point() for value in inputs.values()):
        raise NotApplicable("no input is of floating point")
    for name, value in inputs.items():
        if value.is_floating_point():
            value = inputs[name] = value.clone()
            value[1] = float("nan")
            value[3].flatten()[-1:] = float("inf")
            value[4].flatten()[:1] = float("-inf")
    outputs = s.call(inputs)
    keep = torch.tensor([0, 2, 5, 6])
    clean = {name: value[keep] for name, value in inputs.items()}
    s.check_values(clean, {name: value[keep] for name, value in outputs.items()})
    for name, value in outputs.items():
        if value.is_floating_point() and value[1].isfinite().all():
            raise Mismatch(f"{s.label}, output {name!r}, row 1: found finite values, expected its NaN to show")


def results_kept(s: Session) -> None:
    """The results of one call are still there after the next: no buffer is handed out twice."""
    draws = [s.operation.sample(ODD, generator(f"{s.operation.name} kept {i}")) for i in range(2)]
    first, _ = s.launch(draws[0])
    before = {name: s.target.get(value) for name, value in first.items()}
    second, _ = s.launch(draws[1])
    for name, value in first.items():
        if value.numel() and shares_memory(value, second[name]) and s.operation.row_disjoint(name):
            raise Mismatch(f"{s.label}, output {name!r}: two calls gave the same memory; expected fresh memory")
        check_equal(f"{s.label}, output {name!r} after a second call", s.target.get(value), before[name], "unchanged")


def deterministic(s: Session) -> None:
    """Bitwise the same over repeats, with other work between."""
    claimed(s, "deterministic")
    inputs = s.operation.sample(MANY, generator(f"{s.operation.name} repeats"))
    other = s.operation.sample(ODD, generator(f"{s.operation.name} between"))
    first = s.call(inputs)
    for _ in range(3):
        s.call(other)
        for name, value in s.call(inputs).items():
            check_equal(f"{s.label}, output {name!r}, repeated", value, first[name], "as the first time")


def batch_invariant(s: Session) -> None:
    """Bitwise the same for a row, whatever the number of rows beside it and wherever it stands."""
    claimed(s, "batch_invariant")
    inputs = s.operation.sample(MANY, generator(f"{s.operation.name} batch"))
    whole = s.call(inputs)
    order = torch.randperm(MANY, generator=generator("order"))
    shuffled = order.tolist() if not s.operation.sorted_rows else [*range(0, MANY, 2)]
    for rows in (*([i] for i in (0, 1, MANY - 1)), [*range(5)], [*range(9, 40)], shuffled):
        part = s.call({name: value[rows] for name, value in inputs.items()})
        for name, value in part.items():
            where = f"{s.label}, output {name!r}, {len(rows)} rows from row {rows[0]} of {MANY}"
            check_equal(where, value, whole[name][rows], "as among all rows")


def claimed(s: Session, cap: str) -> None:
    """Raise NotApplicable unless the provider claims a cap."""
    if cap not in s.chosen.provider.caps:
        raise NotApplicable(f"{s.chosen.label} does not claim {cap}")
