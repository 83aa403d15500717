"""Builds the backend's operators on the GPU if there is one, else on the host for the interpreter, and the reference's.

In the interpreter only float32 is tried: its dot product of bfloat16 is wrong.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from deepinfer_nvidia_sm100 import plugin
from reference_support import operator as reference

from deepinfer_core.api import BuildContext, DeviceInfo, LazyRef, OpRequest, Provider, SamplingBatch, StepLayout

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = ("float32", "bfloat16", "float16") if ON_GPU else ("float32",)

INFO = DeviceInfo(
    backend="nvidia_sm100",
    type="cuda",
    arch="sm_90",
    count=1,
    memory=1 << 30,
    priority=200,
    evidence="test",
    provider=LazyRef("deepinfer_nvidia_sm100.device:CudaDevice"),
)
HOOKS = (
    plugin.deepinfer_attention,
    plugin.deepinfer_fused,
    plugin.deepinfer_gemm,
    plugin.deepinfer_kv_layout,
    plugin.deepinfer_pointwise,
    plugin.deepinfer_runner_ops,
    plugin.deepinfer_sampling,
)


def providers() -> list[Provider]:
    return [provider for hook in HOOKS for provider in hook(INFO)]


def on_cuda(request: OpRequest) -> OpRequest:
    return attrs.evolve(request, device_type="cuda")


def eligible(request: OpRequest) -> list[Provider]:
    """Best first."""
    request = on_cuda(request)
    found = [p for p in providers() if p.op == request.op and request.demands <= p.caps and p.supports(request)]
    return sorted(found, key=lambda provider: -(provider.supports(request).score or 0))


def context(**changes: Any) -> BuildContext:
    def plain(request: OpRequest) -> Any:
        built = reference(attrs.evolve(request, device_type="cpu"))
        return built if DEVICE.type == "cpu" else _reference_on_gpu(request)

    fields: dict[str, Any] = {
        "device": DEVICE,
        "max_tokens": 64,
        "max_requests": 8,
        "max_model_len": 256,
        "num_threads": 1,
        "settings": None,
        "reference": plain,
    }
    return BuildContext(**(fields | changes))


def _reference_on_gpu(request: OpRequest) -> Any:
    from reference_support import candidates

    (provider,) = candidates(attrs.evolve(request, device_type="cpu"))
    assert isinstance(provider.build, LazyRef)
    return provider.build.load()(request, context())


def operator(request: OpRequest, name: str | None = None) -> Any:
    """The best provider's operator, or the one called ``name``."""
    chosen = next(p for p in eligible(request) if name in (None, p.name))
    assert isinstance(chosen.build, LazyRef)
    return chosen.build.load()(on_cuda(request), context())


def here(value: Any) -> Any:
    """A tensor, or a record of tensors, on the tests' device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, dict):
        return {key: here(item) for key, item in value.items()}
    if isinstance(value, StepLayout | SamplingBatch) or attrs.has(type(value)):
        return attrs.evolve(value, **{f.name: here(getattr(value, f.name)) for f in attrs.fields(type(value))})
    return value


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit by bit on a GPU; in the interpreter, whose products are the host's BLAS, as close as those are."""
    if ON_GPU:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Equal up to one rounding of the result and float32 sums."""
    tolerance = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}[dtype]
    torch.testing.assert_close(found.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)
