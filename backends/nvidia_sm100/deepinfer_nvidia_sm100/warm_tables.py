"""Sampling stages over tables of every width: kernels that are compiled for the number of biased ids or bad words.

The engine widens such tables to powers of four as requests want it, and never narrows them: requests alone would reach
one sequence of widths, so the operators are called here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch

from deepinfer_core.api import SamplingBatch, SamplingState

BIASED = (1, 4, 16, 64, 256)
BAD_WORDS = tuple((count, length) for count in (1, 4, 16, 64, 256, 1024) for length in (1, 4, 16, 64))


def tables(state: SamplingState, vocab_size: int, token_limit: int) -> Iterator[tuple[str, SamplingBatch]]:
    """Stage, and a batch of one row for it. ``token_limit`` as the engine's steps have it."""
    words = -(-vocab_size // 32)
    slots = state.top_k.shape[0]
    where = state.top_k.device

    def nothing(*shape: int, fill: float = -1, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, fill, dtype=dtype, device=where)

    def batch(grammar: torch.Tensor | None = None, **changes: Any) -> SamplingBatch:
        return SamplingBatch(
            state=attrs.evolve(state, **changes),
            slots=nothing(1, fill=0),
            positions=nothing(1, fill=1),
            token_limit=token_limit,
            active=frozenset(),
            max_position=1,
            grammar=grammar,
        )

    for width in BIASED:
        values = nothing(slots, width, fill=0.0, dtype=torch.float32)
        yield "bias", batch(bias_ids=nothing(slots, width), bias_values=values)
    for count, length in BAD_WORDS:
        yield "mask", batch(bad_words=nothing(slots, count, length))
    everything = nothing(1, words, dtype=torch.int32)
    for allowed in (None, nothing(slots, words, dtype=torch.int32)):
        for grammar in (None, everything):
            yield "mask", batch(grammar, allowed=allowed)


def run_tables(llm: Any) -> None:
    """Every stage, over every width, of an engine that waits for requests."""
    runner, vocab_size = llm.engine.core.runner, int(llm.engine.planned.spec.vocab_size)
    state = runner.state.sampling
    with torch.inference_mode():
        for stage, batch in tables(state, vocab_size, runner.token_limit):
            logits = torch.zeros((1, vocab_size), device=state.top_k.device)
            getattr(llm.engine.ops, f"sampling_{stage}").run(logits, batch)
