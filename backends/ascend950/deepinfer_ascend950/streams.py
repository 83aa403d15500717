"""One NPU stream: a step's closure is launched on it and an event marks its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from deepinfer_core.api import Event, Stream

T = TypeVar("T")


class NpuEvent(Generic[T]):
    """The end of one submitted closure."""

    def __init__(self, event: Any, result: T | None, error: BaseException | None) -> None:
        self._event, self._result, self._error = event, result, error

    def done(self) -> bool:
        return self._error is not None or bool(self._event.query())

    def wait(self) -> T:
        """Block until finished; what the closure returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        self._event.synchronize()
        return self._result  # type: ignore[return-value]


class NpuStream(Stream):
    """Launches closures in order. ``runtime`` is ``torch.npu``, handed in by the device."""

    def __init__(self, runtime: Any, *, overlap: bool) -> None:
        self._runtime = runtime
        self._stream = runtime.Stream()
        self._overlap = overlap

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        """Launch the device work of ``fn``; its Python part runs here and now."""
        with self._runtime.stream(self._stream):
            event = self._runtime.Event()
            try:
                result = fn()
            except Exception as error:  # the engine decides what a failed step means
                return NpuEvent(event, None, error)
            event.record(self._stream)
        if not self._overlap:
            event.synchronize()
        return NpuEvent(event, result, None)

    def close(self) -> None:
        self._stream.synchronize()
