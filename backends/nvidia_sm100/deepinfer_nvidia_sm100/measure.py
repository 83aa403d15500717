"""Times work on the GPU: many launches in one graph, over inputs that rotate so that the cache holds none of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

CACHE_BYTES = 256 << 20
"""More than the second-level cache of any device that is served: rotating inputs take at least this much together."""


def rotations(bytes_each: int, most: int = 64) -> int:
    """How many sets of inputs of this size keep each other out of the cache."""
    return max(1, min(most, -(-CACHE_BYTES // max(1, bytes_each))))


def microseconds(calls: Sequence[Callable[[], object]], *, rounds: int = 5, target: float = 2000.0) -> float:
    """Median time of one call. ``calls`` do the same work on different inputs; a round lasts about ``target`` us."""
    graph = _recorded(calls)
    once = _elapsed(graph, 1) / len(calls)
    repeats = max(1, min(200, round(target / max(once * len(calls), 1e-3))))
    return statistics.median(_elapsed(graph, repeats) / (repeats * len(calls)) for _ in range(rounds))


def side_by_side(
    ways: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int = 7, target: float = 2000.0
) -> dict[str, float]:
    """Median time of one call of each way. Rounds alternate: all meet the same clock and the same neighbours."""
    graphs = {name: _recorded(calls) for name, calls in ways.items()}
    repeats = {}
    for name, graph in graphs.items():
        _elapsed(graph, 1)
        repeats[name] = max(1, min(200, round(target / max(_elapsed(graph, 1), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(_elapsed(graph, repeats[name]) / (repeats[name] * len(ways[name])))
    return {name: statistics.median(found) for name, found in times.items()}


def microseconds_once(calls: Sequence[Callable[[], object]], restore: Callable[[], object], rounds: int = 7) -> float:
    """The same for calls that overwrite their inputs: each runs once a round, after ``restore``, which is not timed."""
    graph = _recorded(calls)
    times = []
    for _ in range(rounds):
        restore()
        torch.cuda.synchronize()
        times.append(_elapsed(graph, 1) / len(calls))
    return statistics.median(times)


def recorded_us(call: Callable[[], torch.Tensor], rounds: int = 7) -> tuple[float, torch.Tensor]:
    """Median microseconds of a call in a graph, one replay a round, and its result."""
    results: list[torch.Tensor] = []
    graph = _recorded([lambda: results.append(call())])
    _elapsed(graph, 1)
    return statistics.median(_elapsed(graph, 1) for _ in range(rounds)), results[-1].clone()


def _recorded(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000.0


def copy_bandwidth(size: int = 4 << 30) -> float:
    """Bytes a second of a device-to-device copy, read and written. Not in a graph, where a slower engine copies."""
    source = torch.empty(size // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000)
    return 2 * size / statistics.median(times[2:])


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a square bf16 product by cuBLAS, on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / microseconds([lambda: torch.mm(a, b)], target=20000.0) * 1e6
