"""One step of every module on the same draws; on an accelerator all of it is one CUDA graph.

The modules are so small that starting their kernels one by one takes longer than the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .trained import Data, Trained

WARM_UP = 3
"""Steps without effect before the capture: programs are compiled, the optimiser makes its moments."""


class Steps:
    """``losses`` are those of the newest step, ``[]`` float32 each."""

    def __init__(self, modules: Mapping[str, Trained], data: Data, generator: torch.Generator) -> None:
        self._modules, self._data, self._generator = modules, data, generator
        self._places = data.places()
        self.losses = {name: torch.zeros((), device=data.head.device) for name in modules}
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, say: Callable[[str], None], capture: bool) -> None:
        """Compile, and capture where asked to; a capture that fails leaves steps as they are."""
        if not capture:
            self._warm_up(say, 1)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._warm_up(say, WARM_UP)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                self._body(tuple(self._modules))
        except Exception as error:  # the run goes on, only slower
            say(f"not captured: {type(error).__name__}: {str(error)[:2000]}")
            torch.cuda.synchronize()
            return
        self._graph = graph
        say("captured")

    def step(self, share: float) -> None:
        """Draw, forward, backward, update at ``share`` of the learning rates."""
        self._data.choose(self._places, self._generator)
        for module in self._modules.values():
            module.optimiser.aim(share)
        if self._graph is None:
            self._body(tuple(self._modules))
        else:
            self._graph.replay()

    def _warm_up(self, say: Callable[[str], None], count: int) -> None:
        for name, module in self._modules.items():
            module.optimiser.aim(0.0)
            for _ in range(count):
                self._data.choose(self._places, self._generator)
                self._body((name,))
            say(f"{name}: first steps")

    def _body(self, names: tuple[str, ...]) -> None:
        drawn = self._data.drawn(self._places)
        for name in names:
            module = self._modules[name]
            loss = module.loss(drawn)
            loss.backward()  # type: ignore[no-untyped-call]
            module.optimiser.update()
            self.losses[name].copy_(loss.detach())
