"""Which errors say that the GPU has no memory: torch's own, and what runtime, cuBLAS and driver raise past it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from deepinfer_nvidia_sm100.device import CudaDevice

DEVICE = cast(CudaDevice, None)
"""The method reads nothing of its device, which needs a GPU."""


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_no_memory_is_told_from_other_faults(error: Any, full: bool) -> None:
    assert CudaDevice.is_out_of_memory(DEVICE, error) is full
