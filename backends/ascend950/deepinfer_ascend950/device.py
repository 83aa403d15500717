"""The device: memory, streams, and the copies between host and NPU. Not run on hardware.

Built only in a process that chose this backend. torch_npu is imported here and nowhere else; it adds ``torch.npu`` and
the operators ``torch.ops.npu`` itself, and nothing of torch or of the core is assigned to from here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import DeviceInfo, MemoryInfo, Stream

from .environment import apply
from .streams import NpuStream

OUT_OF_MEMORY = ("npu out of memory", "207001", "el0004")
"""What errors of the allocator, of the runtime (ACL_ERROR_RT_MEMORY_ALLOCATION) and of its log say."""
HALF = ("bfloat16", "float16")


class AscendDevice:
    """The first visible NPU. ``ASCEND_RT_VISIBLE_DEVICES`` says which are visible, as for every CANN program."""

    def __init__(self, info: DeviceInfo, runtime: Any = None) -> None:
        """``runtime``: ``torch.npu``; None imports torch_npu first, with its variables set."""
        self.info = info
        self._applied = None
        if runtime is None:
            self._applied = apply(os.environ)
            importlib.import_module("torch_npu")
            runtime = torch.npu  # type: ignore[attr-defined]
        self._runtime = runtime
        self._copies = runtime.Stream()

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.info.type, 0)

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def default_dtype(self, stored: str) -> str:
        """The 16-bit type the checkpoint was saved in, else bfloat16: the cube cores multiply 16-bit types."""
        return stored if stored in HALF else "bfloat16"

    @property
    def overlaps(self) -> bool:
        return True

    def stream(self, *, overlap: bool) -> Stream:
        return NpuStream(self._runtime, overlap=overlap)

    def memory(self) -> MemoryInfo:
        free, total = self._runtime.mem_get_info()
        return MemoryInfo(total=int(total), free=int(free))

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """A copy on the device, launched on the current stream."""
        return torch.from_numpy(array).to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Copied on a stream of its own, so that it waits for no step submitted since.

        Called by a closure, it waits for what that has launched: the current stream is the closure's then. Otherwise it
        is the default one, where nothing runs.
        """
        self._copies.wait_stream(self._runtime.current_stream())
        with self._runtime.stream(self._copies):
            host = tensor.to("cpu", non_blocking=True)
        self._copies.synchronize()
        return host.numpy()

    def is_out_of_memory(self, error: BaseException) -> bool:
        text = str(error).lower()
        return isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in OUT_OF_MEMORY)

    def describe(self) -> Mapping[str, str]:
        facts = {"hardware": "not run on hardware by the authors", "torch": torch.__version__}
        if self._applied is not None:
            facts["variables set"] = ", ".join(self._applied.set) or "none"
            if self._applied.too_late:
                facts["variables"] = (
                    "torch_npu had been imported before they were set; TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents that"
                )
        return facts
