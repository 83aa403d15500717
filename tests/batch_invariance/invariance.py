"""Builds operators as the engine does, and compares a row's bits in every kind of company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepinfer_batch_invariance import plugin
from deepinfer_batch_invariance.self_check import same_bits

from deepinfer_core.api import BuildContext, DeviceInfo, LazyRef, OpRequest, Provider
from deepinfer_core.cpu import plugin as cpu
from deepinfer_core.reference import plugin as reference

CAP = "batch_invariant"
MOST_ROWS = 257

DEVICE = DeviceInfo(
    backend="cpu",
    type="cpu",
    arch="test",
    count=1,
    memory=1 << 30,
    priority=0,
    evidence="test",
    provider=LazyRef("deepinfer_core.cpu.device:CpuDevice"),
)
HOOKS = (
    "deepinfer_attention",
    "deepinfer_gemm",
    "deepinfer_moe_communication",
    "deepinfer_pointwise",
    "deepinfer_sampling",
    "deepinfer_runner_ops",
)


def providers() -> list[tuple[str, Provider]]:
    """``(plugin, provider)`` of this plugin and of the core's two that serve the host."""
    modules = {"batch_invariance": plugin, "cpu": cpu, "reference": reference}
    return [
        (name, provider)
        for name, module in modules.items()
        for hook in HOOKS
        if hasattr(module, hook)
        for provider in getattr(module, hook)(DEVICE)
    ]


def context(num_threads: int = 1) -> BuildContext:
    return BuildContext(
        device=torch.device("cpu"),
        max_tokens=512,
        max_requests=64,
        max_model_len=1024,
        num_threads=num_threads,
        settings=None,
        reference=reference_operator,
    )


def reference_operator(request: OpRequest) -> Any:
    """The definition."""
    (provider,) = (p for p in _of("reference", request.op) if p.supports(request))
    return _build(provider, request)


def operator(request: OpRequest, label: str, num_threads: int = 1) -> Any:
    """The operator of ``plugin:provider``, which declares the cap and takes the request."""
    name, _, own = label.partition(":")
    (provider,) = (p for p in _of(name, request.op) if p.name == own)
    assert CAP in provider.caps
    assert provider.supports(request), provider.supports(request).reason
    return _build(provider, request, num_threads)


def _of(name: str, op: str) -> list[Provider]:
    return [provider for owner, provider in providers() if owner == name and provider.op == op]


def _build(provider: Provider, request: OpRequest, num_threads: int = 1) -> Any:
    build = provider.build.load() if isinstance(provider.build, LazyRef) else provider.build
    return build(request, context(num_threads))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def companies(rows: int, seed: int) -> list[list[int]]:
    """Ways to run these rows: some of them alone, in halves, in chunks, in another order, a few together."""
    source = random.Random(seed)
    alone = [[row] for row in source.sample(range(rows), min(rows, 5))]
    cut = source.randrange(rows + 1)
    halves = [list(range(cut)), list(range(cut, rows))]
    chunk = source.randrange(1, 40)
    chunks = [list(range(start, min(start + chunk, rows))) for start in range(0, rows, chunk)][:8]
    shuffled = source.sample(range(rows), rows)
    few = source.sample(range(rows), min(rows, source.randrange(1, 9))) if rows else []
    return [company for company in (*alone, *halves, *chunks, shuffled, few) if company]


Answer = Callable[[Sequence[int]], Any]
"""Runs an operator on these rows: a tensor, or a tuple of tensors, whose first dimension is theirs."""


def check_company(run: Answer, rows: int, seed: int = 0) -> None:
    """Every row has the bits it has among all rows, in whatever company."""
    whole = _tuple(run(list(range(rows))))
    for company in companies(rows, seed):
        for part, (found, wanted) in enumerate(zip(_tuple(run(company)), whole, strict=True)):
            for place, row in enumerate(company):
                assert same_bits(found[place], wanted[row]), (
                    f"result {part} of row {row} of {rows} moved among {len(company)} rows"
                )


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)
