"""A model that counts upwards and costs nothing, as a plugin: what remains of a step is the engine's own work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from deepinfer_core.api import (
    CacheEntry,
    CacheGroupSpec,
    LazyRef,
    ModelBatch,
    ModelContext,
    ModelInfo,
    ModelOptions,
    ModelSpec,
    PluginInfo,
    hookimpl,
)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="toymodel", help="A model that counts upwards and costs nothing")


@hookimpl
def deepinfer_models() -> Sequence[ModelInfo]:
    return [ModelInfo(architectures=("CountUp",), definition=LazyRef(f"{__name__}:CountUp"))]


class CountUp:
    """Next token = (token + 1) mod vocabulary. The hidden state is the token id; the cache is never touched."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = torch.eye(vocab_size).roll(1, dims=1)

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        group = CacheGroupSpec(name="full", layers=1, entries=(CacheEntry("token", (), "int8"),))
        return ModelSpec(
            architecture="CountUp",
            vocab_size=config["vocab_size"],
            max_model_len=options.max_model_len or config["max_position_embeddings"],
            dtype=options.dtype,
            num_layers=1,
            hidden_size=1,
            cache_groups=(group,),
            ops={},
            tensors={},
        )

    @classmethod
    def build(cls, context: ModelContext) -> Self:
        return cls(context.spec.vocab_size)

    def plan(self, batch: ModelBatch) -> None:
        return None

    def forward(self, batch: ModelBatch, plan: None) -> torch.Tensor:
        """``[T]`` int64."""
        return batch.token_ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N]`` -> ``[N, vocab_size]``."""
        return self._rows[hidden]
