"""Builds reference operators through their plugin, and the records they take, for the tests beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import (
    BuildContext,
    DeviceInfo,
    LazyRef,
    OpRequest,
    Provider,
    SamplingBatch,
    SamplingRequest,
    SamplingState,
    StepLayout,
)
from deepinfer_core.reference import plugin

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other

DEVICE = DeviceInfo(
    backend="test",
    type="cpu",
    arch="test",
    count=1,
    memory=1 << 30,
    priority=0,
    evidence="test",
    provider=LazyRef("deepinfer_core.reference:missing"),
)

HOOKS = (
    plugin.deepinfer_attention,
    plugin.deepinfer_fused,
    plugin.deepinfer_gemm,
    plugin.deepinfer_moe_communication,
    plugin.deepinfer_pointwise,
    plugin.deepinfer_sampling,
    plugin.deepinfer_runner_ops,
    plugin.deepinfer_kv_layout,
)


def providers() -> list[Provider]:
    return [provider for hook in HOOKS for provider in hook(DEVICE)]


def candidates(request: OpRequest) -> list[Provider]:
    """The providers that would take this request."""
    return [p for p in providers() if p.op == request.op and request.demands <= p.caps and p.supports(request)]


def operator(request: OpRequest) -> Any:
    """The one reference operator for a request, built as the engine builds it."""
    (provider,) = candidates(request)
    context = BuildContext(
        device=torch.device("cpu"),
        max_tokens=64,
        max_requests=8,
        max_model_len=256,
        num_threads=1,
        settings=None,
        reference=operator,
    )
    assert isinstance(provider.build, LazyRef)
    return provider.build.load()(request, context)


def stage(name: str, vocab_size: int) -> Any:
    return operator(SamplingRequest(stage=name, vocab_size=vocab_size))


def layout(
    queries: Sequence[int], contexts: Sequence[int], block_size: int, *, seed: int = 0
) -> tuple[StepLayout, int]:
    """A step of requests with these query and context lengths over shuffled blocks, and the blocks of its pool."""
    needed = [-(-context // block_size) for context in contexts]
    width = max(needed, default=0)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(sum(needed), generator=generator) + 1
    table = torch.zeros((len(queries), width), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = pool[taken : taken + count].to(torch.int32)
        taken += count
    ends = np.cumsum([0, *queries])
    spans = [torch.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
    positions = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    owners = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(list(queries), dtype=torch.int64))
    slots = table[owners, positions // block_size].long() * block_size + positions % block_size
    return StepLayout(
        block_size=block_size,
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        seq_lens=torch.tensor(list(contexts), dtype=torch.int32),
        positions=positions,
        block_table=table,
        slot_mapping=slots,
        host_query_lens=np.array(queries, dtype=np.int32),
        host_seq_lens=np.array(contexts, dtype=np.int32),
        max_query_len=max(queries, default=0),
        max_seq_len=max(contexts, default=0),
    ), sum(needed) + 1


def _padded(rows: Sequence[Sequence[Any]], fill: Any, dtype: torch.dtype, align_right: bool = False) -> torch.Tensor:
    width = max((len(row) for row in rows), default=0)
    table = torch.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        if len(row):
            place = slice(width - len(row), width) if align_right else slice(0, len(row))
            table[index, place] = torch.tensor(list(row), dtype=dtype)
    return table


def _bad_words(rows: Sequence[Sequence[Sequence[int]]]) -> torch.Tensor:
    count = max((len(row) for row in rows), default=0)
    length = max((len(word) for row in rows for word in row), default=0)
    table = torch.full((len(rows), count, length), -1, dtype=torch.int64)
    for index, row in enumerate(rows):
        for number, word in enumerate(row):
            table[index, number, length - len(word) :] = torch.tensor(list(word), dtype=torch.int64)
    return table


def _bit_rows(rows: Sequence[Sequence[int] | None], vocab_size: int) -> torch.Tensor:
    words = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.uint32)
    for index, row in enumerate(rows):
        for token in range(vocab_size) if row is None else row:
            words[index, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


def batch(rows: Sequence[dict[str, Any]], vocab_size: int, **changes: Any) -> SamplingBatch:
    """One slot and one row for each dict of parameters; what a dict leaves out is off.

    Keys: prompt, output (token lists), temperature, min_p, top_p, top_k, presence, frequency, repetition, seed,
    child, min_end, stop_ids, bias (dict), bad_words, allowed, grammar (token lists), position.
    """

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    tokens = [[*row.get("prompt", []), *row.get("output", [])] for row in rows]
    positions = [row.get("position", len(past)) for row, past in zip(rows, tokens, strict=True)]
    seeds = [row.get("seed", 0) for row in rows]
    restricted = any("allowed" in row for row in rows)
    state = SamplingState(
        history=_padded([[*past, 0] for past in tokens], 0, torch.int32),
        prompt_len=torch.tensor([len(row.get("prompt", [])) for row in rows], dtype=torch.int64),
        temperature=column("temperature", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        top_p=column("top_p", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        presence=column("presence", 0.0, torch.float32),
        frequency=column("frequency", 0.0, torch.float32),
        repetition=column("repetition", 1.0, torch.float32),
        seed_lo=torch.tensor([seed % 2**32 for seed in seeds], dtype=torch.int64),
        seed_hi=torch.tensor([seed // 2**32 for seed in seeds], dtype=torch.int64),
        child=column("child", 0, torch.int64),
        min_end=column("min_end", 0, torch.int64),
        stop_ids=_padded([row.get("stop_ids", []) for row in rows], -1, torch.int64),
        bias_ids=_padded([list(row.get("bias", {})) for row in rows], -1, torch.int64),
        bias_values=_padded([list(row.get("bias", {}).values()) for row in rows], 0.0, torch.float32),
        bad_words=_bad_words([row.get("bad_words", []) for row in rows]),
        allowed=_bit_rows([row.get("allowed") for row in rows], vocab_size) if restricted else None,
    )
    constrained = any("grammar" in row for row in rows)
    fields: dict[str, Any] = {
        "state": state,
        "slots": torch.arange(len(rows)),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "token_limit": vocab_size,
        "active": frozenset(),
        "max_position": max(positions, default=0),
        "grammar": _bit_rows([row.get("grammar") for row in rows], vocab_size) if constrained else None,
    }
    return SamplingBatch(**(fields | changes))


def kept(logits: torch.Tensor) -> list[list[int]]:
    """Ids that are not -inf, for each row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]
