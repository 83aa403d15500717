"""The cap ``graph_capture``: recorded once, replayed with other inputs."""

from __future__ import annotations

from deepinfer_core.api import CapturesGraphs
from deepinfer_core.conformance.case import NotApplicable
from deepinfer_core.conformance.compare import check_equal

from .checks import ODD, Session, claimed
from .operation import Tensors, generator


def graph_capture(s: Session) -> None:
    """A recorded call, replayed after its inputs were overwritten in place, gives what a fresh call gives."""
    claimed(s, "graph_capture")
    target, operation = s.target, s.operation
    device = target.device
    if not isinstance(device, CapturesGraphs):
        raise NotApplicable("this device records no graphs, so the cap cannot be proved")
    first, *others = (operation.sample(ODD, generator(f"{operation.name} graph {i}")) for i in range(3))
    fresh = [s.call(inputs) for inputs in others]
    static = target.work(lambda: {name: target.put(value) for name, value in first.items()})
    graph = target.work(lambda: device.capture(lambda: dict(operation.call(s.chosen.operator, static, s.weights))))
    for number, (inputs, expected) in enumerate(zip(others, fresh, strict=True), start=1):

        def replay(inputs: Tensors = inputs) -> Tensors:
            for name, value in inputs.items():
                static[name].copy_(target.put(value))
            return graph.replay()

        for name, value in target.work(replay).items():
            where = f"{s.label}, output {name!r}, replay {number} of the recorded call, with other inputs"
            check_equal(where, target.get(value), expected[name], "as without a graph")
