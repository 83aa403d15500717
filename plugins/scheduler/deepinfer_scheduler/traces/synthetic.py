"""Generated loads, the same ones for the same seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping

import attrs
import numpy as np

from deepinfer_core.api.simulation import SimulatedRequest, SimulationConfig

from .files import Source

CHUNK = 4096
"""Random numbers drawn at once."""


@attrs.frozen(kw_only=True)
class Load:
    """What is generated: requests in all, how many come in a second on average, and the seed."""

    requests: int
    rate: float
    seed: int = 0


def synthetic(kind: str, load: Load) -> Source:
    """Requests of a kind in :data:`KINDS`."""
    return Source(
        name=f"{kind}, {load.requests} requests at {load.rate:g}/s",
        requests=lambda config: itertools.islice(_MAKERS[kind](load, config), load.requests),
    )


def _chat(load: Load, config: SimulationConfig) -> Iterator[SimulatedRequest]:
    random = np.random.default_rng(load.seed)
    return _talk(random, _poisson(random, load.rate))


def _bursty(load: Load, config: SimulationConfig) -> Iterator[SimulatedRequest]:
    """Minutes of twice the rate after minutes of hardly any."""
    random = np.random.default_rng(load.seed)
    return _talk(random, _switched(random, load.rate))


def _talk(random: np.random.Generator, times: Iterator[float]) -> Iterator[SimulatedRequest]:
    lengths = zip(_lengths(random, 220, 1.0, 8000), _lengths(random, 130, 0.8, 2000), strict=True)
    for number, (arrival, (prompt, output)) in enumerate(zip(times, lengths, strict=False)):
        yield SimulatedRequest(
            id=str(number), arrival=arrival, prompt=prompt, outputs=(output,), max_tokens=2000,
            tenant=f"user{number % 8}",
        )  # fmt: skip


@attrs.frozen(kw_only=True)
class Agents:
    """Sessions of agents: a context that every session shares, more of it at once, and then turn after turn.

    With these numbers contexts have 77,000 tokens on average, 96 % of which the turn before had too.
    """

    shared: int = 24_000
    first: int = 37_500
    turns: int = 32
    added: int = 2_300
    output: int = 180
    pause: float = 20.0


def _agents(load: Load, config: SimulationConfig, shape: Agents = Agents()) -> Iterator[SimulatedRequest]:
    """Sessions begin at random; the turns of one follow each other after pauses."""
    random = np.random.default_rng(load.seed)
    size = config.block_size
    starts = _poisson(random, load.rate / shape.turns)
    coming: list[tuple[float, int, int, int]] = []  # time, session, turn, context
    session, next_start = 0, next(starts)
    for number in itertools.count():
        while not coming or next_start <= coming[0][0]:
            heapq.heappush(coming, (next_start, session, 0, shape.first + int(random.integers(0, 2000))))
            session, next_start = session + 1, next(starts)
        arrival, who, turn, context = heapq.heappop(coming)
        output = 1 + int(random.exponential(shape.output))
        blocks = (context + output) // size
        common = min(shape.shared // size, blocks)
        own = (who + 1) << 24
        yield SimulatedRequest(
            id=f"{number}", arrival=arrival, prompt=context, outputs=(output,), tenant=f"agent{who % 16}",
            blocks=(*range(common), *range(own + common, own + blocks)),
        )  # fmt: skip
        if turn + 1 < shape.turns:
            grown = context + output + 1 + int(random.exponential(shape.added))
            pause = random.exponential(shape.pause)
            heapq.heappush(coming, (arrival + pause, who, turn + 1, grown))


def _mixed(load: Load, config: SimulationConfig) -> Iterator[SimulatedRequest]:
    """Seven of eight requests are people who wait for an answer, every eighth is a document; these come in heaps."""
    random = np.random.default_rng(load.seed)
    people = _talk(random, _poisson(random, load.rate * 7 / 8))
    heaps = (at for at in _poisson(random, load.rate / 8 / 16) for _ in range(16))
    lengths = zip(_lengths(random, 3000, 0.4, 12_000), _lengths(random, 250, 0.4, 1000), strict=True)
    batch = (
        SimulatedRequest(id=f"b{n}", arrival=at, prompt=p, outputs=(o,), max_tokens=1000, tenant="batch", priority=0)
        for n, (at, (p, o)) in enumerate(zip(heaps, lengths, strict=False))
    )
    interactive = (attrs.evolve(p, tenant="interactive", priority=1, ttft_target=2.0, tpot_target=0.1) for p in people)
    return heapq.merge(interactive, batch, key=lambda request: request.arrival)


def _flood(load: Load, config: SimulationConfig) -> Iterator[SimulatedRequest]:
    """Four tenants who ask now and then, and one who sends nine of ten requests."""
    random = np.random.default_rng(load.seed)
    for number, request in enumerate(_talk(random, _poisson(random, load.rate))):
        yield attrs.evolve(request, tenant="flood" if number % 10 else f"user{number // 10 % 4}")


_MAKERS: Mapping[str, Callable[[Load, SimulationConfig], Iterator[SimulatedRequest]]] = {
    "chat": _chat,
    "bursty": _bursty,
    "agents": _agents,
    "mixed": _mixed,
    "flood": _flood,
}
KINDS = tuple(_MAKERS)


def _poisson(random: np.random.Generator, rate: float) -> Iterator[float]:
    now = 0.0
    while True:
        for gap in random.exponential(1 / rate, CHUNK).tolist():
            now += gap
            yield now


def _switched(random: np.random.Generator, rate: float, on: float = 30.0, off: float = 60.0) -> Iterator[float]:
    """Poisson arrivals of ``2.8 * rate`` for ``on`` seconds and ``0.1 * rate`` for ``off`` seconds, on average."""
    now = 0.0
    while True:
        for factor, mean in ((2.8, on), (0.1, off)):
            end = now + random.exponential(mean)
            while (gap := random.exponential(1 / (factor * rate))) < end - now:
                now += gap
                yield now
            now = end  # what would have come later is drawn again: the process has no memory


def _lengths(random: np.random.Generator, median: float, spread: float, most: int) -> Iterator[int]:
    """Log-normal lengths."""
    while True:
        drawn = np.exp(random.normal(np.log(median), spread, CHUNK))
        yield from np.clip(drawn, 1, most).astype(np.int64).tolist()
