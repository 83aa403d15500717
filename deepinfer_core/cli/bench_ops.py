"""Time by operator: a stand-in for each operator of the table that keeps count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import torch

from deepinfer_core.api import Choice

UNTIMED = ("prepare", "caps", "name")
"""What happens at load time, and what is no work."""


@attrs.define
class OpTime:
    """Calls of one method of one operator, and their seconds."""

    slot: str
    op: str
    method: str
    provider: str
    calls: int = 0
    seconds: float = 0.0


class OpTimer:
    """Makes stand-ins through the table's own seam (``wrap_op``) and adds up.

    Args:
        synchronise: waits for the device, so that an operator's time is its own; not called on the host, where
            operators return when they are done.
    """

    def __init__(self, synchronise: Callable[[], None] = torch.accelerator.synchronize) -> None:
        self._synchronise = synchronise
        self._rows: list[OpTime] = []

    def wrap(self, choice: Choice, op: Any) -> Any:
        """The stand-in; layouts are no work and stay as they are."""
        return op if choice.op.startswith("kv_layout.") else _TimedOp(choice, op, self)

    def rows(self) -> list[OpTime]:
        """What was called, most time first."""
        return sorted((row for row in self._rows if row.calls), key=lambda row: -row.seconds)

    def reset(self) -> None:
        for row in self._rows:
            row.calls, row.seconds = 0, 0.0

    def timed(self, choice: Choice, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        row = OpTime(choice.slot, choice.op, method, choice.provider)
        self._rows.append(row)
        clock = time.perf_counter
        synchronise = None if choice.request["device_type"] == "cpu" else self._synchronise

        def measured(*arguments: Any, **named: Any) -> Any:
            start = clock()
            try:
                return call(*arguments, **named)
            finally:
                if synchronise is not None:
                    synchronise()
                row.seconds += clock() - start
                row.calls += 1

        return measured


class _TimedOp:
    """Has whatever the operator has; public methods are timed from their first use on."""

    def __init__(self, choice: Choice, op: Any, timer: OpTimer) -> None:
        self._choice = choice
        self._op = op
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._op, name)
        if callable(value) and not name.startswith("_") and name not in UNTIMED:
            value = self._timer.timed(self._choice, name, value)
        setattr(self, name, value)
        return value
