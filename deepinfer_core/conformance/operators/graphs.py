"""The cap ``graph_capture``: captured once, replayed with other inputs."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_core.conformance.case import NotApplicable
from deepinfer_core.conformance.compare import check_equal

from .checks import ODD, Session
from .operation import generator


def graph_capture(s: Session) -> None:
    """A captured call, replayed after its inputs were overwritten in place, gives what a fresh call gives.

    Not run on hardware where torch has no graphs for the device: the case is skipped and says so.
    """
    if "graph_capture" not in s.chosen.provider.caps:
        raise NotApplicable(f"{s.chosen.label} does not claim graph_capture")
    graph_class: Any = getattr(torch.accelerator, "Graph", None)
    here = torch.accelerator.current_accelerator()
    if graph_class is None or here is None or here.type != s.target.device.info.type:
        raise NotApplicable(f"torch has no graphs for device type {s.target.device.info.type!r}: not proved")
    first, second = (s.operation.sample(ODD, generator(f"{s.operation.name} graph {i}")) for i in range(2))
    fresh = s.call(second)
    target, operation = s.target, s.operation
    static = target.work(lambda: {name: target.put(value) for name, value in first.items()})
    target.work(lambda: operation.call(s.chosen.operator, static, s.weights))  # warm up
    torch.accelerator.synchronize()
    graph = graph_class()

    def capture() -> Any:
        with graph:
            return dict(operation.call(s.chosen.operator, static, s.weights))

    outputs = target.work(capture)

    def replay() -> None:
        for name, value in second.items():
            static[name].copy_(target.put(value))
        graph.replay()

    target.work(replay)
    torch.accelerator.synchronize()
    for name, value in outputs.items():
        check_equal(f"{s.label}, output {name!r}, replayed with other inputs", target.get(value), fresh[name])
