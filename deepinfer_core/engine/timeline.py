"""What happened to one request, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from .request import Sequence

TimelineKind = Literal[
    "queued", "waiting", "admitted", "chunk", "first_token", "preempted", "resumed", "finished"
]  # fmt: skip

MAX_EVENTS = 512
"""Events kept of one request; beyond these only its end is noted."""


class TimelineEvent(NamedTuple):
    """A tuple, so that it unpacks as ``time, event, detail``.

    Attributes:
        time: seconds on the engine's monotonic clock, never decreasing within a request.
        detail: ``child`` always (0 unless n > 1), and by event

            * ``queued``: ``prompt``, tokens. ``waiting``: ``reason``, noted when it changes.
            * ``admitted``, ``resumed``: ``tokens`` known, ``cached`` of them found in the prefix cache.
            * ``chunk``: ``start`` and ``tokens`` of the prompt rows (or, after a preemption, recomputed rows) that
              a step took.
            * ``preempted``: ``tokens`` known. ``finished``: ``reason``, and ``tokens`` of output.
    """

    time: float
    event: TimelineKind
    detail: Mapping[str, int | str]


def note(sequence: Sequence, time: float, event: TimelineKind, **detail: int | str) -> None:
    """Append to the timeline of a sequence's request."""
    timeline = sequence.request.metrics.timeline
    if len(timeline) < MAX_EVENTS or event == "finished":
        timeline.append(TimelineEvent(time, event, {"child": sequence.child, **detail}))
