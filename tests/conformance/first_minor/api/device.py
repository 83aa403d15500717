"""Devices: how a backend is found, and the few things the engine asks of one.

A backend declares its devices in ``deepinfer_probe`` from device files and drivers, without
importing torch or opening a context. The engine loads ``DeviceInfo.provider`` only for the
backend that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import attrs

from .provider import LazyRef

if TYPE_CHECKING:
    import numpy as np
    import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FallbackPolicy = Literal["error", "warn", "allow"]


@attrs.frozen(kw_only=True)
class ProbeEnv:
    """What a probe may look at. Probes look at devices and drivers, never at importable packages.

    Attributes:
        environ: a copy of the process environment.
        root: file-system root, ``"/"`` outside tests.
    """

    environ: Mapping[str, str]
    root: str = "/"


@attrs.frozen(kw_only=True)
class DeviceInfo:
    """One kind of device that a backend found on this machine.

    Attributes:
        backend: name users choose with ``accelerator=``; unique among plugins.
        type: torch device type (``"cpu"``, or one registered out of tree).
        arch: instruction set or compute capability, as the vendor writes it.
        count: devices of this kind.
        memory: bytes of one device (for the host: of the machine).
        priority: highest wins when the user names none. 0 is the host; accelerators use 100 and more.
        evidence: what the probe saw (``"/dev/..., driver 1.2"``), shown by ``explain``.
        provider: factory ``(DeviceInfo) -> Device``.
        fallback: the backend's own word on falling back to reference operators; ``None`` means ``error``.
        legacy_names: values of ``DEEPINFER_ACCELERATOR`` of the original engine that mean this backend.
    """

    backend: str
    type: str
    arch: str
    count: int
    memory: int
    priority: int
    evidence: str
    provider: LazyRef
    fallback: FallbackPolicy | None = None
    legacy_names: tuple[str, ...] = ()


@attrs.frozen
class MemoryInfo:
    """Bytes, of the device the engine runs on."""

    total: int
    free: int


class Event(Protocol[T_co]):
    """The end of one submitted closure."""

    def done(self) -> bool:
        """True once the device work has finished; never blocks."""
        ...

    def wait(self) -> T_co:
        """Block until finished, return what the closure returned, or raise what it raised."""
        ...


class Stream(Protocol):
    """An ordered queue of device work. Closures run in the order they were submitted."""

    def submit(self, fn: Callable[[], T]) -> Event[T]:
        """Launch all device work of ``fn``. May return before it has finished."""
        ...

    def close(self) -> None:
        """Finish what was submitted and release the queue. Idempotent."""
        ...


class Device(Protocol):
    """The chosen device.

    ``upload`` and ``download`` are the only ways the engine moves bytes between host and device.
    """

    info: DeviceInfo

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def num_threads(self) -> int:
        """Host threads that operators may use."""
        ...

    def default_dtype(self, stored: str) -> str:
        """Compute dtype for ``dtype="auto"``, given the dtype name the checkpoint was saved in."""
        ...

    @property
    def overlaps(self) -> bool:
        """True when ``submit`` returns before the work is done at no cost: the loop then runs one step ahead."""
        ...

    def stream(self, *, overlap: bool) -> Stream:
        """A new stream. ``overlap=True`` asks that ``submit`` return before the work is done."""
        ...

    def memory(self) -> MemoryInfo: ...

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A device tensor with the array's values and dtype. It may share the array's memory: the caller gives the
        array away and writes to it no more."""
        ...

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """A host array with the tensor's values; waits for them."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True when ``error`` says that the device ran out of memory."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Facts for ``explain``: threads, libraries, instruction sets."""
        ...
