"""One step of the reference sampler for rows that differ in temperature, top_k and top_p."""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_core.api import STAGES, BuildContext, DeviceInfo, LazyRef, SamplingBatch, SamplingRequest, SamplingState
from deepinfer_core.reference import plugin


def built_stage(name: str, vocab_size: int) -> Any:
    """The reference's operator for one stage."""
    device = DeviceInfo(
        backend="test",
        type="cpu",
        arch="",
        count=1,
        memory=1,
        priority=0,
        evidence="",
        provider=LazyRef("deepinfer_core.reference:none"),
    )
    request = SamplingRequest(stage=name, vocab_size=vocab_size)
    (provider,) = [p for p in plugin.deepinfer_sampling(device) if p.supports(request)]
    context = BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=64,
        max_model_len=64,
        num_threads=1,
        settings=None,
        reference=lambda _: None,
    )
    assert isinstance(provider.build, LazyRef)
    return provider.build.load()(request, context)


def step(rows: list[dict[str, float]], position: int = 3) -> SamplingBatch:
    """One slot a row. Keys: temperature (1), top_k (0), top_p (1), seed (0); in brackets what a row leaves out."""
    count = len(rows)

    def column(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros((count, *shape), dtype=torch.int64)

    state = SamplingState(
        history=zeros(position + 1).to(torch.int32),
        prompt_len=zeros() + position,
        temperature=column("temperature", 1.0),
        min_p=torch.zeros(count),
        top_p=column("top_p", 1.0),
        top_k=column("top_k", 0, torch.int64),
        presence=torch.zeros(count),
        frequency=torch.zeros(count),
        repetition=torch.ones(count),
        seed_lo=column("seed", 0, torch.int64),
        seed_hi=zeros(),
        child=zeros(),
        min_end=zeros(),
        stop_ids=zeros(0),
        bias_ids=zeros(0),
        bias_values=torch.zeros(count, 0),
        bad_words=zeros(0, 0),
        allowed=None,
    )
    return SamplingBatch(
        state=state,
        slots=torch.arange(count),
        positions=zeros() + position,
        token_limit=1 << 30,
        active=frozenset(STAGES),
        max_position=position,
    )


def through(names: tuple[str, ...], logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """``[N, V]`` float32 through these stages, in this order."""
    for name in names:
        logits = built_stage(name, logits.shape[1]).run(logits.clone(), batch)
    return logits
