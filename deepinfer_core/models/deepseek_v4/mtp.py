"""The next-token module (MTP): one more layer that reads the main model's streams and the token that followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepinfer_core.api import DraftModuleSpec, ModelBatch, ModelContext, ModelOptions, ModelSpec

from .attention import attention_plans
from .block import Block, load_head
from .config import V4Config
from .drafts import check_consumed, draft_needs, draft_spec, load_ends, load_stage, read_draft_config
from .groups import DRAFT
from .model import Ends
from .names import draft_prefix
from .weights import Loader

ARCHITECTURE = "DeepseekV4MTP"


class DeepseekV4MTP:
    """Drafts the token after next. Stateless between steps, like every model."""

    def __init__(self, config: V4Config, spec: ModelSpec, ops: Any, block: Block, ends: Ends, parts: Any) -> None:
        self.config = config
        self.spec = spec
        self.ops = ops
        self.block = block
        self.ends = ends
        self.parts: Mapping[str, Any] = parts

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        c = read_draft_config(config, "mtp")
        n = draft_needs(c, options)
        ops = {name: n.linear(c.hidden, c.hidden, [f"{draft_prefix(0)}{name}.weight"]) for name in ("e_proj", "h_proj")}
        return draft_spec(n, ARCHITECTURE, ops, causal=True, draft=DraftModuleSpec(taps=(c.layers - 1,)))

    @classmethod
    def build(cls, context: ModelContext) -> DeepseekV4MTP:
        main: Ends | None = None if context.target is None else context.target.ends
        c = read_draft_config(context.config, "mtp")
        ops, loader, p = context.ops, Loader.of(context, c), draft_prefix(0)
        embedding, head = load_ends(ops, loader, main)
        block = load_stage(c, ops, loader, 0)
        parts = {
            "e_proj": ops.e_proj.prepare(loader.weights(p, ("e_proj",))),
            "h_proj": ops.h_proj.prepare(loader.weights(p, ("h_proj",))),
            "enorm": loader.vector(f"{p}enorm.weight"),
            "hnorm": loader.vector(f"{p}hnorm.weight"),
        }
        ends = Ends(
            embedding=embedding,
            hyper_head=load_head(ops.hyper_head, loader, p),
            norm=loader.vector(f"{p}norm.weight"),
            head=head,
        )
        check_consumed(loader, c)
        return cls(c, context.spec, ops, block, ends, parts)

    def plan(self, batch: ModelBatch) -> dict[str, Any]:
        return attention_plans(self.ops, ("window",), batch, DRAFT)

    def plan_context(self, batch: ModelBatch) -> dict[str, Any]:
        """What :meth:`inject` needs of a step: it attends to nothing."""
        return {"rope_window": self.ops.rope_window.plan(batch.positions)}

    def inject(self, streams: torch.Tensor, batch: ModelBatch, plan: dict[str, Any]) -> None:
        """Keep what later rows attend to: the keys of a single layer depend on no attention.

        Arguments as of :meth:`forward`.
        """
        ops, block, q_rank = self.ops, self.block, self.config.q_rank
        x, _ = ops.hyper.mix(self._joined(batch, streams), block.attention_mixing)
        kv = ops.qkv_a.run(ops.norm.run(x, block.attention_norm), block.attention.qkv_a)[:, q_rank:]
        block.attention.write(kv, batch, ops.rope_window, plan["rope_window"], ops.attention_window)

    def _joined(self, batch: ModelBatch, streams: torch.Tensor) -> torch.Tensor:
        """The layer's input: ``[T, M, hidden]``."""
        ops, parts = self.ops, self.parts
        token = ops.norm.run(ops.embedding.run(batch.token_ids, self.ends.embedding), parts["enorm"])
        token = ops.e_proj.run(token, parts["e_proj"])
        rows = ops.h_proj.run(ops.norm.run(streams, parts["hnorm"]).flatten(0, 1), parts["h_proj"])
        joined: torch.Tensor = rows.view(streams.shape) + token[:, None]
        return joined

    def forward(
        self, batch: ModelBatch, plan: dict[str, Any], streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step.

        Args:
            batch: at each row, the position t of the streams and the id of token t + 1.
            streams: ``[T, M, hidden]``: the main model's final streams of position t, before their last sum; or the
                streams this returned for t, to draft further.

        Returns:
            ``[T, hidden]`` for :meth:`logits`, which then speaks of token t + 2; and the module's own streams.
        """
        ops = self.ops
        h = self.block.run(self._joined(batch, streams), batch, plan)
        return ops.norm.run(ops.hyper_head.run(h, self.ends.hyper_head), self.ends.norm), h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` -> ``[N, vocab_size]`` float32."""
        logits: torch.Tensor = self.ops.head.run(hidden, self.ends.head)
        return logits
