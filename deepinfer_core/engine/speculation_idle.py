"""Steps that draft for nobody: shown to the drafter several at a time, and measured now and then.

Each by itself would meet cold caches, on the host, and make it wait, on an accelerator.
"""

from __future__ import annotations

from typing import Literal

from .speculation_rows import TargetRows

IDLE_STEPS, IDLE_ROWS = 8, 1024
"""Steps, and their rows, that a drafter is shown together. More would be objects enough for the garbage collector to
begin, which a steady engine never makes it do; a full collection takes 0.1 s."""

MEASURED_EACH = 4
"""Steps of which one is measured."""


class IdleSteps:
    """Those that the drafter has not seen yet, and how many were not measured."""

    def __init__(self) -> None:
        self._unseen: list[TargetRows] = []
        self._rows = 0
        self._unmeasured = 0

    def add(self, ran: TargetRows) -> bool:
        """A step without drafts ran. True when the drafter shall see what there is."""
        self._unseen.append(ran)
        self._rows += len(ran.inputs.positions)
        return len(self._unseen) >= IDLE_STEPS or self._rows >= IDLE_ROWS

    def take(self) -> list[TargetRows]:
        """Those not seen, in their order; from now on they are."""
        unseen, self._unseen, self._rows = self._unseen, [], 0
        return unseen

    @property
    def measures(self) -> Literal["step", "end", "nothing"]:
        """Whether a step without drafts is measured. The end of the one before it must be waited for, on a device
        that works behind the host's back."""
        left = MEASURED_EACH - self._unmeasured
        return "step" if left <= 1 else "end" if left == 2 else "nothing"

    def ran(self) -> None:
        """Another step, with or without drafts."""
        self._unmeasured += 1

    def measured(self) -> int:
        """How many steps the measured one stands for, itself included."""
        count, self._unmeasured = self._unmeasured, 0
        return count
