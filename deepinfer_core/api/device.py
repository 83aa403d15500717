"""Devices: how a backend is found, and the few things the engine asks of one.

A backend declares its devices in ``deepinfer_probe`` from device files and drivers, without
importing torch or opening a context. The engine loads ``DeviceInfo.provider`` only for the
backend that was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

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
        block_size: tokens of a cache block that suit the backend's operators, where nobody set one and the model asks
            for no multiple of its own; None: the setting's default.
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
    block_size: int | None = None


@attrs.frozen(kw_only=True)
class NoDevice:
    """Why a backend has no device to offer on this machine.

    It is the answer to a user who asks for the backend by name, and ``explain`` lists it among the losers.

    Attributes:
        backend, legacy_names: as in :class:`DeviceInfo`.
        reason: what is missing, one line (``"/dev/acme0 is there, driver 1.2 is older than 1.4"``).
        fix: what to do or the command to check with, one line.
    """

    backend: str
    reason: str
    fix: str
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
        """A host array with the values of a tensor that a finished closure returned (``Event.wait`` came back).

        Waits for nothing but its own copy: not for closures that were submitted since. Called by a closure, for what
        it has itself computed so far (a drafter's read-back), it waits for that first.
        """
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True when ``error`` says that the device ran out of memory."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Facts for ``explain``: threads, libraries, instruction sets."""
        ...


class Graph(Protocol[T_co]):
    """Device work that was recorded once."""

    def replay(self) -> T_co:
        """Launch the recorded work again, on the same memory, and return what the closure returned then.

        Tensors of that result hold the new values until the next replay of any graph of the device.
        """
        ...


@runtime_checkable
class CapturesGraphs(Protocol):
    """What a :class:`Device` has besides when it can record work and launch it again at once. Optional.

    A decode step launches the same operators every time, several hundred of them. Recorded, they cost the host one
    launch. The engine records the forward pass of each number of rows on a grid, largest first, and pads steps with
    rows that write to the null block. Nothing else in it may change from one replay to the next:

    * It reads its inputs from tensors that the engine keeps and refills: their addresses are part of the record.
      ``block_table`` has the width of ``max_model_len``, whatever the step needs.
    * Numbers of the host are fixed. ``max_seq_len`` and ``host_seq_lens`` say ``max_model_len``, ``host_query_lens``
      says 1: bounds, not the step's own.
    * Memory allocated inside belongs to the graphs, which share it.

    Only operators with the cap ``graph_capture`` are recorded; it means that ``run``, and ``plan`` where there is
    one, read tensors on the device alone, wait for nothing, and take those numbers for bounds.
    """

    def capture(self, fn: Callable[[], T]) -> Graph[T]:
        """Run ``fn``, once or more, and record its work. Raises what ``fn`` raises."""
        ...
