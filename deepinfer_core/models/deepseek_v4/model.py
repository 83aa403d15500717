"""DeepSeek-V4 as an architecture: what it needs, how it loads, how a step runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from deepinfer_core.api import ExpertShare, ModelBatch, ModelContext, ModelOptions, ModelSpec

from .attention import attention_plans
from .block import Block, load_head
from .config import V4Config
from .groups import WINDOW, cache_groups
from .names import layer_prefix
from .requests import Needs, main_prefixes, model_requests
from .slots import slot_of
from .tensors import StoredFormats, draft_tensors, tensor_specs, tensors_here
from .weights import Loader

ARCHITECTURE = "DeepseekV4ForCausalLM"

Keep = Callable[[torch.Tensor], torch.Tensor]
"""What a drafter keeps of streams that the next layer may overwrite: a copy, or less."""


@attrs.frozen(kw_only=True, eq=False)
class Ends:
    """The model's two ends: embedding, the streams' last sum, final norm, output head."""

    embedding: Any
    hyper_head: Any
    norm: torch.Tensor
    head: Any


def needs_of(config: V4Config, options: ModelOptions, prefixes: Any, window_group: str = WINDOW) -> Needs:
    """What requests are derived from, for the main model or for a draft module."""
    return Needs(
        config=config,
        options=options,
        formats=StoredFormats.read(options.stored, config, options.dtype),
        prefixes=prefixes,
        max_model_len=min(options.max_model_len or config.max_positions, config.max_positions),
        qdq=options.qdq == "on" or (options.qdq == "auto" and config.quantised),
        window_group=window_group,
    )


class DeepseekV4Model:
    """The main model."""

    def __init__(self, config: V4Config, spec: ModelSpec, ops: Any, blocks: Sequence[Block], ends: Ends) -> None:
        self.config = config
        self.spec = spec
        self.ops = ops
        self.blocks = blocks
        self.ends = ends
        self._kinds = tuple(dict.fromkeys(config.kinds))

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        c = V4Config.read(config)
        needs = needs_of(c, options, main_prefixes(c))
        drafts = [(name, shape) for name, shape in draft_tensors(c) if name in needs.formats.names]
        mine, elsewhere = tensors_here(c, options.experts)
        return ModelSpec(
            architecture=ARCHITECTURE,
            vocab_size=c.vocab,
            max_model_len=needs.max_model_len,
            dtype=options.dtype,
            num_layers=c.layers,
            hidden_size=c.hidden,
            cache_groups=cache_groups(c, options.dtype),
            block_alignment=c.block_alignment,
            ops=model_requests(needs),
            tensors=tensor_specs(mine, needs.formats, partial(slot_of, config=c))
            | tensor_specs(elsewhere, needs.formats, optional=True, loaded=False)
            | tensor_specs(iter(drafts), needs.formats, optional=True, loaded=False),
        )

    @classmethod
    def build(cls, context: ModelContext) -> DeepseekV4Model:
        c = V4Config.read(context.config)
        parts = load_parts(c, context.ops, Loader.of(context, c), context.experts)
        return cls(c, context.spec, context.ops, *parts)

    def plan(self, batch: ModelBatch) -> dict[str, Any]:
        return attention_plans(self.ops, self._kinds, batch)

    def forward(self, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        return self.collapse(self.streams(batch, plan)[0])

    def forward_tapped(
        self, batch: ModelBatch, plan: dict[str, Any], taps: Sequence[int], keep: Keep = torch.clone
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What :meth:`forward` returns, and ``keep`` of the ``[T, M, hidden]`` streams that leave layers ``taps``."""
        streams, tapped = self.streams(batch, plan, taps, keep)
        return self.collapse(streams), tapped

    def streams(
        self, batch: ModelBatch, plan: dict[str, Any], taps: Sequence[int] = (), keep: Keep = torch.clone
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The final streams ``[T, M, hidden]``, and what is kept of those leaving each layer in ``taps``."""
        h = self.ops.embedding.run(batch.token_ids, self.ends.embedding)
        h = h[:, None].repeat(1, self.config.streams, 1)
        tapped: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.blocks):
            h = block.run(h, batch, plan)
            if layer in taps:
                # The next layer may overwrite its input.
                tapped[layer] = keep(h)
        return h, [tapped[layer] for layer in taps]

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """``[T, M, hidden]`` -> ``[T, hidden]``, normed for the output head."""
        summed = self.ops.hyper_head.run(streams, self.ends.hyper_head)
        hidden: torch.Tensor = self.ops.norm.run(summed, self.ends.norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.ops.head.run(hidden, self.ends.head)
        return logits

    def expert_counts(self) -> torch.Tensor:
        """``[layers, experts + 1]`` int64 on the device: rows sent to each expert since loading, for every layer.

        The last column counts rows whose router scores were all NaN. Read-only for callers.
        """
        return torch.stack([block.experts.counts for block in self.blocks])


def load_parts(c: V4Config, ops: Any, loader: Loader, share: ExpertShare | None = None) -> tuple[list[Block], Ends]:
    """Read everything of the main model, layer by layer; of the experts only this process's share."""
    embedding = ops.embedding.prepare(loader.tensor("embed.weight"))
    seen = {"window": 0, "csa": 0, "hca": 0}
    blocks = []
    for layer, (kind, hashed) in enumerate(zip(c.kinds, c.hashed, strict=True)):
        blocks.append(
            Block.load(
                c,
                ops,
                loader,
                layer_prefix(layer),
                kind=kind,
                hashed=hashed,
                group=WINDOW,
                window_index=layer,
                entry_index=seen[kind],
                share=share,
            )
        )
        seen[kind] += 1
    ends = Ends(
        embedding=embedding,
        hyper_head=load_head(ops.hyper_head, loader, ""),
        norm=loader.vector("norm.weight"),
        head=ops.head.prepare([loader.weight("head.weight")]),
    )
    return blocks, ends
