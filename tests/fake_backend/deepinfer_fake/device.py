"""The device: streams, memory, and the only two ways bytes move between it and the host."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepinfer_core.api import DeviceInfo, MemoryInfo, ProcessGroup, Stream

from .memory import POOL, FakeOutOfMemory
from .stream import DELAY, LateStream


class FakeDevice:
    """Built once, and only when this backend was chosen."""

    num_threads = 1
    overlaps = True

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        POOL.capacity = info.memory

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.info.type)

    def default_dtype(self, stored: str) -> str:
        return "float64" if stored == "float64" else "float32"

    def stream(self, *, overlap: bool) -> Stream:
        """Late in both cases: a queue may always return before the work is done."""
        return LateStream(DELAY)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(POOL.capacity, POOL.capacity - POOL.used)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A copy in the pool. The host's array is given away: writing to it raises from now on."""
        array.flags.writeable = False
        copied = POOL.empty(array.shape, torch.from_numpy(np.empty(0, array.dtype)).dtype)
        copied.numpy()[...] = array
        return copied

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy().copy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, FakeOutOfMemory | MemoryError)

    def join(self, rank: int, size: int, init_method: str, timeout: float) -> ProcessGroup:
        """As a device with a library of its own would meet its neighbours; this one borrows the host's."""
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        handle = dist.group.WORLD
        assert handle is not None
        return ProcessGroup(rank=rank, size=size, handle=handle, device_type=self.info.type)

    def describe(self) -> Mapping[str, str]:
        return {"queue": f"late, by {DELAY * 1000:g} ms", "torch": torch.__version__}
