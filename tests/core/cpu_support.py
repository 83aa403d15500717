"""Builds the host's operators through their plugin, as the engine does, for the tests beside it."""

from __future__ import annotations

from typing import Any

import attrs
import reference_support
import torch

from deepinfer_core.api import BuildContext, LazyRef, OpRequest, Provider, SamplingRequest
from deepinfer_core.cpu import plugin

HOST = attrs.evolve(reference_support.DEVICE, backend="cpu")
HOOKS = (
    plugin.deepinfer_attention,
    plugin.deepinfer_fused,
    plugin.deepinfer_gemm,
    plugin.deepinfer_kv_layout,
    plugin.deepinfer_pointwise,
    plugin.deepinfer_sampling,
    plugin.deepinfer_runner_ops,
)


def providers() -> list[Provider]:
    return [provider for hook in HOOKS for provider in hook(HOST)]


def verdicts(request: OpRequest) -> dict[str, Any]:
    """Name of every provider of the operator whose caps suffice -> its verdict on the request."""
    return {p.name: p.supports(request) for p in providers() if p.op == request.op and request.demands <= p.caps}


def operator(request: OpRequest, name: str | None = None) -> Any:
    """The named provider's operator, or that of the one with the highest score."""
    scores = {n: v.score for n, v in verdicts(request).items() if v}
    chosen = name or max(scores, key=lambda n: scores[n] or 0)
    assert chosen in scores
    (provider,) = (p for p in providers() if p.op == request.op and p.name == chosen)
    context = BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=8,
        max_model_len=256,
        num_threads=1,
        settings=None,
        reference=reference_support.operator,
    )
    assert isinstance(provider.build, LazyRef)
    return provider.build.load()(request, context)


def stage(name: str, vocab_size: int) -> Any:
    return operator(SamplingRequest(stage=name, vocab_size=vocab_size))


def normal(*shape: int, seed: int) -> torch.Tensor:
    """float32, standard normal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
