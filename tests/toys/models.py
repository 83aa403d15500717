"""The toy models. Each keeps the token ids themselves as its cache, so that a wrong block shows.

``config.json`` fields: ``vocab_size``, ``max_position_embeddings``, ``groups`` (cache group name -> window or
null), and each model's own. A test may put a function into ``model.before`` (called with the batch before each
forward pass) or ``model.after`` (called with the logits; returns those to use).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, ModelBatch, ModelContext, ModelOptions, ModelSpec, StepLayout

from .oracle import HASH_ROWS, hash_logits, mix


def cache_group(name: str, window: int | None) -> CacheGroupSpec:
    entries = (CacheEntry("token", (), "int64"),)
    return CacheGroupSpec(
        name=name, kind="full" if window is None else "window", layers=1, entries=entries, window=window
    )


class Toy:
    """What all toys share: a cache that holds token ids, and hooks for tests."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any]) -> None:
        self.spec = spec
        self.config = config
        self.before: Callable[[ModelBatch], None] = lambda batch: None
        self.after: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
        self.steps = 0

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        limit = config["max_position_embeddings"]
        return ModelSpec(
            architecture=f"Toy{cls.__name__}",
            vocab_size=config["vocab_size"],
            max_model_len=min(options.max_model_len or limit, limit),
            dtype=options.dtype,
            num_layers=1,
            hidden_size=2,
            cache_groups=tuple(cache_group(name, window) for name, window in config["groups"].items()),
            ops={},
            tensors={},
        )

    @classmethod
    def build(cls, context: ModelContext) -> Self:
        return cls(context.spec, context.config)

    def plan(self, batch: ModelBatch) -> None:
        return None

    def forward(self, batch: ModelBatch, plan: None) -> torch.Tensor:
        """``[T, 2]`` float64: what the row's logits depend on."""
        self.steps += 1
        self.before(batch)
        for name, layout in batch.layouts.items():
            self.cache(batch, name).view(-1)[layout.slot_mapping] = batch.token_ids
        return torch.stack((self.state(batch).to(torch.float64), batch.positions.to(torch.float64)), dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(self.scores(hidden[:, 0].to(torch.int64)).to(torch.float32))

    def cache(self, batch: ModelBatch, name: str) -> torch.Tensor:
        return batch.caches[name][0]["token"]

    def state(self, batch: ModelBatch) -> torch.Tensor:
        """``[T]`` int64 below 2^53."""
        return batch.token_ids

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        """``[N]`` -> ``[N, V]``."""
        raise NotImplementedError


class Count(Toy):
    """Next token = (last token + 1) mod ``count_mod`` (default: the vocabulary)."""

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        following = (state + 1) % self.config.get("count_mod", self.spec.vocab_size)
        return torch.nn.functional.one_hot(following, self.spec.vocab_size) * 10.0


class Const(Toy):
    """Fixed logits: ``logits`` (token id -> value), all others -5."""

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        row = torch.full((self.spec.vocab_size,), -5.0, device=state.device)
        for token, value in self.config["logits"].items():
            row[int(token)] = value
        return row.expand(len(state), -1).clone()


class Flat(Toy):
    """Uniform logits."""

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(state), self.spec.vocab_size, device=state.device)


class Script(Toy):
    """The token after position p is ``script[p]``, whatever came before."""

    def state(self, batch: ModelBatch) -> torch.Tensor:
        return batch.positions

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        script = torch.tensor(self.config["script"], device=state.device)
        return torch.nn.functional.one_hot(script[state % len(script)], self.spec.vocab_size) * 10.0


class PrefixHash(Toy):
    """Logits from a hash of every token that a row can reach through its block tables, in their order there."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any]) -> None:
        super().__init__(spec, config)
        self.windows = {group.name: group.window for group in spec.cache_groups}
        self.table = torch.from_numpy(hash_logits(spec.vocab_size))

    def state(self, batch: ModelBatch) -> torch.Tensor:
        total = torch.zeros_like(batch.positions)
        for weight, (name, layout) in enumerate(batch.layouts.items(), start=1):
            total += weight * self.reachable(self.cache(batch, name), layout, self.windows[name])
        return total % HASH_ROWS

    def reachable(self, cache: torch.Tensor, layout: StepLayout, window: int | None) -> torch.Tensor:
        """``[T]``: sum of ``mix(token, place)`` over the places a row sees, read from the cache."""
        places = torch.arange(layout.max_seq_len, device=cache.device)
        blocks = layout.block_table.to(torch.int64)[:, places // layout.block_size]
        values = mix(cache[blocks, places % layout.block_size], places)
        sums = torch.nn.functional.pad(values.cumsum(dim=1), (1, 0))
        ends = layout.positions + 1
        rows = torch.arange(len(ends), device=cache.device)
        row_requests = torch.searchsorted(layout.cu_seqlens[1:], rows, right=True)
        starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
        return sums[row_requests, ends] - sums[row_requests, starts]

    def scores(self, state: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(state.device)  # once, before any graph is recorded
        return self.table[state]
