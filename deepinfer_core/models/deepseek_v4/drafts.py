"""What the draft modules share: their needs, their layers, and the main model's embedding and output head.

A draft module is a model of its own, described and built like one. Its rows are kept in the group ``draft``, under the
main model's block numbering. Its checkpoint is the main model's: names ``mtp.*``, and the two ends it shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from deepinfer_core.api import CheckpointError, ConfigError, DraftModuleSpec, ModelOptions, ModelSpec, OpRequest

from .block import Block
from .config import DraftKind, V4Config
from .groups import DRAFT, window_group
from .model import Ends, needs_of
from .names import draft_prefix
from .requests import Needs, block_requests, embedding_and_head
from .tensors import draft_tensors, tensor_specs
from .weights import Loader

SHARED = ("embed.weight", "head.weight")


def read_draft_config(config: Mapping[str, Any], kind: DraftKind) -> V4Config:
    """The config of a checkpoint with draft stages of this kind.

    Raises:
        ConfigError: it has none, or others.
    """
    c = V4Config.read(config)
    if c.draft_kind != kind:
        has = f"{c.drafts} of kind {c.draft_kind!r}" if c.drafts else "none"
        raise ConfigError(
            f"config.json: compress_ratios of {c.layers + c.drafts} entries for {c.layers} layers: a draft module of "
            f"kind {kind!r} was asked for, the checkpoint has {has}"
        )
    return c


def draft_needs(c: V4Config, options: ModelOptions) -> Needs:
    """Needs of the draft stages: window attention, never experts by table, and all experts in every process."""
    options = attrs.evolve(options, experts=None)
    prefixes = tuple((draft_prefix(stage), "window", False) for stage in range(c.drafts))
    return needs_of(c, options, prefixes, DRAFT)


def draft_spec(
    n: Needs, architecture: str, ops: Mapping[str, OpRequest], *, causal: bool, draft: DraftModuleSpec
) -> ModelSpec:
    """Spec of a draft module with operators of its own in ``ops``."""
    c, formats = n.config, n.formats
    ends = iter(((SHARED[0], (c.vocab, c.hidden)), (SHARED[1], (c.vocab, c.hidden))))
    return ModelSpec(
        architecture=architecture,
        vocab_size=c.vocab,
        max_model_len=n.max_model_len,
        dtype=n.options.dtype,
        num_layers=c.drafts,
        hidden_size=c.hidden,
        cache_groups=(window_group(DRAFT, c, n.options.dtype, c.drafts),),
        block_alignment=c.block_alignment,
        ops=embedding_and_head(n) | block_requests(n, causal=causal) | dict(ops),
        tensors=tensor_specs(draft_tensors(c), formats) | tensor_specs(ends, formats),
        draft=draft,
    )


def load_stage(c: V4Config, ops: Any, loader: Loader, stage: int) -> Block:
    """One draft stage's layer."""
    return Block.load(
        c,
        ops,
        loader,
        draft_prefix(stage),
        kind="window",
        hashed=False,
        group=DRAFT,
        window_index=stage,
        entry_index=0,
    )


def load_ends(ops: Any, loader: Loader, main: Ends | None) -> tuple[Any, Any]:
    """Embedding and output head: those of a main model with the same operators, or read again."""
    if main is not None:
        return main.embedding, main.head
    return ops.embedding.prepare(loader.tensor(SHARED[0])), ops.head.prepare([loader.weight(SHARED[1])])


def check_consumed(loader: Loader, c: V4Config) -> None:
    """Every draft tensor of the checkpoint was read: one left out would only cost acceptance, silently.

    Raises:
        CheckpointError: naming the first ten.
    """
    stored = [name for released, name in loader.formats.names.items() if released.startswith("mtp.")]
    left = sorted(set(stored) - loader.read)
    if left:
        raise CheckpointError(f"{len(left)} draft tensors of {c.drafts} stages were not used: {', '.join(left[:10])}")


def to_streams(x: torch.Tensor, streams: int) -> torch.Tensor:
    """``[T, hidden]`` -> ``[T, streams, hidden]``, all equal."""
    return x[:, None].repeat(1, streams, 1)
