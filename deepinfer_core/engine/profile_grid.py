"""Which loads a profile of step costs runs: small ones first, as large as the engine's limits allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from .intake import Limits

CONTEXTS = (128, 512, 2048)
SHORT = 8
"""Tokens of the prompts before decode steps of every size; at the other contexts every second power of two runs."""
DECODED = 8
"""Tokens that each request of a decode point produces."""
BESIDE = 16
"""The same where a prompt comes while others decode, of requests that are at most:"""
COMPANY = 8
CONTINUED = 64
"""New tokens after a prefix that is cached."""


@attrs.frozen
class Asked:
    """One request: tokens that it shares with those of the runs before, new ones, and how many it produces."""

    shared: int
    fresh: int
    output: int


@attrs.frozen
class Point:
    """A load. The last ``late`` requests come once the others decode; ``decodes``: only its decode steps are samples,
    since what comes before them is cached from the second run on."""

    name: str
    requests: tuple[Asked, ...]
    late: int = 0
    decodes: bool = False

    def steps(self, most_rows: int, cached: bool) -> Iterator[int]:
        """Rows of its steps, roughly; ``cached``: what is shared was computed before."""
        rows = sum(each.fresh + (0 if cached else each.shared) or 1 for each in self.requests)
        yield from [most_rows] * (rows // most_rows)
        if rows % most_rows:
            yield rows % most_rows
        for produced in range(1, max(each.output for each in self.requests)):
            yield sum(each.output > produced for each in self.requests)

    def size(self, most_rows: int) -> int:
        """For the order: rows, and steps as eight rows each, since a small step costs as much as a few rows more."""
        return sum(8 + rows for rows in self.steps(most_rows, cached=False))


def grid(limits: Limits) -> Sequence[Point]:
    """Prompts alone, in one chunk or in several, from the start or after a cached prefix; decoding at several contexts;
    both together. Ascending by size."""
    rows, running = limits.max_batch_tokens, limits.max_running
    longest = min(limits.max_model_len, limits.capacity)
    points = []
    lengths = powers(min(rows, longest - 1))
    for prompt in sorted({*lengths, min(longest - 1, 4 * rows)}):
        points.append(Point(f"a prompt of {prompt} tokens", (Asked(0, prompt, 1),)))
    for context in CONTEXTS:
        if context + CONTINUED < longest:
            name = f"a prompt of {CONTINUED} tokens after {context} cached"
            points.append(Point(name, (Asked(context, CONTINUED, 1),)))
    for context in (SHORT, *CONTEXTS):
        for count in powers(running) if context == SHORT else powers(running)[::2]:
            if context + DECODED < longest and count * (context + DECODED + 32) <= limits.capacity:
                name = f"{count} requests decode at {context} tokens"
                points.append(Point(name, (Asked(context, 0, DECODED),) * count, decodes=True))
    for prompt in lengths[3::2]:
        company = (Asked(0, SHORT, BESIDE),) * min(COMPANY, running - 1)
        if company and longest > BESIDE + SHORT:
            points.append(Point(f"a prompt of {prompt} tokens beside decoding", (*company, Asked(0, prompt, 1)), 1))
    return sorted(points, key=lambda point: point.size(rows))


def powers(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself."""
    return sorted({*(1 << bit for bit in range(limit.bit_length())), limit} - {0})
