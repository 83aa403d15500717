"""DSpark: drafts a block of tokens at once from features of the main model, then ties them together left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    DraftModuleSpec,
    EmbeddingRequest,
    ModelBatch,
    ModelContext,
    ModelOptions,
    ModelSpec,
    OpRequest,
)
from deepinfer_core.models.drafted_block import Choose, DraftedBlock, greedy

from .attention import attention_plans
from .block import Block, load_head
from .config import DSparkConfig, V4Config
from .drafts import check_consumed, draft_needs, draft_spec, load_ends, load_stage, read_draft_config, to_streams
from .groups import DRAFT, wide
from .model import Ends
from .names import draft_prefix
from .weights import Loader

ARCHITECTURE = "DeepseekV4DSpark"


class DeepseekV4DSpark:
    """The block drafter. Its caches hold, for every accepted position, what the main model's features project to."""

    def __init__(self, config: V4Config, spec: ModelSpec, ops: Any, blocks: Any, ends: Ends, parts: Any) -> None:
        assert config.dspark is not None
        self.config = config
        self.dspark: DSparkConfig = config.dspark
        self.spec = spec
        self.ops = ops
        self.blocks: Sequence[Block] = blocks
        self.ends = ends
        self.parts: Mapping[str, Any] = parts

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        c = read_draft_config(config, "dspark")
        assert c.dspark is not None
        n, w, last = draft_needs(c, options), wide(options.dtype), draft_prefix(c.drafts - 1)
        rank, features = c.dspark.markov_rank, len(c.dspark.target_layers) * c.hidden
        first_table, second = (f"{last}markov_head.markov_w{i}.weight" for i in (1, 2))
        confidence = f"{last}confidence_head.proj.weight"
        draft = DraftModuleSpec(taps=c.dspark.target_layers, max_drafts=c.dspark.block)
        ops: dict[str, OpRequest] = {
            "main_proj": n.linear(features, c.hidden, [f"{draft_prefix(0)}main_proj.weight"]),
        }
        if not rank:
            return draft_spec(n, ARCHITECTURE, ops, causal=False, draft=draft)
        ops |= {
            "markov_table": EmbeddingRequest(
                vocab_size=c.vocab, hidden=rank, weight_dtype=n.formats.dtype(first_table), **n.common
            ),
            "markov_out": n.linear(rank, c.vocab, [second], out_dtype=w),
            "confidence": n.linear(c.hidden + rank, 1, [confidence], dtype=w, out_dtype=w),
        }
        return draft_spec(n, ARCHITECTURE, ops, causal=False, draft=draft)

    @classmethod
    def build(cls, context: ModelContext) -> DeepseekV4DSpark:
        main: Ends | None = None if context.target is None else context.target.ends
        c = read_draft_config(context.config, "dspark")
        assert c.dspark is not None
        ops, loader = context.ops, Loader.of(context, c)
        first, last = draft_prefix(0), draft_prefix(c.drafts - 1)
        embedding, head = load_ends(ops, loader, main)
        blocks = [load_stage(c, ops, loader, stage) for stage in range(c.drafts)]
        parts = {
            "main_proj": ops.main_proj.prepare(loader.weights(first, ("main_proj",))),
            "main_norm": loader.vector(f"{first}main_norm.weight"),
        }
        if c.dspark.markov_rank:
            parts |= _heads(ops, loader, last)
        ends = Ends(
            embedding=embedding,
            hyper_head=load_head(ops.hyper_head, loader, last),
            norm=loader.vector(f"{last}norm.weight"),
            head=head,
        )
        check_consumed(loader, c)
        return cls(c, context.spec, ops, blocks, ends, parts)

    def plan(self, batch: ModelBatch) -> dict[str, Any]:
        return attention_plans(self.ops, ("window",), batch, DRAFT)

    def plan_context(self, batch: ModelBatch) -> dict[str, Any]:
        """What :meth:`inject` needs of a step: it attends to nothing."""
        return {"rope_window": self.ops.rope_window.plan(batch.positions)}

    def keep(self, streams: torch.Tensor) -> torch.Tensor:
        """What this module reads of ``[T, M, hidden]`` streams leaving a target layer: their mean, ``[T, hidden]``."""
        return streams.mean(1)

    def inject(self, taps: Sequence[torch.Tensor], batch: ModelBatch, plan: dict[str, Any]) -> None:
        """Keep what later drafts attend to, for positions the main model has processed and accepted.

        Args:
            taps: ``[T, hidden]``, :meth:`keep` of the streams leaving each of the target layers.
            batch: the rows' positions and this module's layouts; the token ids are not read.
        """
        ops, c = self.ops, self.config
        features = torch.cat(list(taps), dim=-1)
        x = ops.norm.run(ops.main_proj.run(features, self.parts["main_proj"]), self.parts["main_norm"])
        for block in self.blocks:
            attention = block.attention
            kv = ops.qkv_a.run(x, attention.qkv_a)[:, c.q_rank :]
            attention.write(kv, batch, ops.rope_window, plan["rope_window"], ops.attention_window)

    def forward(self, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        """``[T, hidden]``, *not* normed, of ``block`` rows a request.

        Row 0 of a request is the newest token at position p + 1, the others are the noise token; each row sees all of
        them and the window before. Their own cached rows are overwritten when these positions are injected.
        """
        h = to_streams(self.ops.embedding.run(batch.token_ids, self.ends.embedding), self.config.streams)
        for block in self.blocks:
            h = block.run(h, batch, plan)
        hidden: torch.Tensor = self.ops.hyper_head.run(h, self.ends.hyper_head)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` of :meth:`forward` -> ``[N, vocab_size]`` float32, before the Markov head."""
        logits: torch.Tensor = self.ops.head.run(self.ops.norm.run(hidden, self.ends.norm), self.ends.head)
        return logits

    def draft(
        self, batch: ModelBatch, plan: dict[str, Any], depth: int | None = None, choose: Choose = greedy
    ) -> DraftedBlock:
        """The first ``depth`` tokens of every request's block: each is chosen knowing the one before it."""
        hidden = self.forward(batch, plan)
        block, ops, parts = self.dspark.block, self.ops, self.parts
        logits = self.logits(hidden).view(-1, block, self.config.vocab)
        hidden = hidden.view(-1, block, self.config.hidden)
        previous = batch.token_ids.view(-1, block)[:, 0]
        drafted = DraftedBlock.gather()
        for j in range(block if depth is None else depth):
            scores, confidence = logits[:, j], None
            if self.dspark.markov_rank:
                tie = ops.markov_table.run(previous, parts["markov_table"])
                scores = scores + ops.markov_out.run(tie, parts["markov_out"])
                both = torch.cat((hidden[:, j], tie), dim=-1).to(scores.dtype)
                confidence = ops.confidence.run(both, parts["confidence"])[:, 0]
            previous = drafted.add(choose(scores, j), confidence).clamp(min=0)
        return drafted.done()

    def inputs(self, newest: torch.Tensor) -> torch.Tensor:
        """``[R]`` newest token of each request -> ``[R, block]`` ids for :meth:`draft`."""
        ids = newest.new_full((newest.shape[0], self.dspark.block), self.dspark.noise_token)
        ids[:, 0] = newest
        return ids


def _heads(ops: Any, loader: Loader, last: str) -> dict[str, Any]:
    """Markov head and confidence head, which are the last stage's."""
    return {
        "markov_table": ops.markov_table.prepare(loader.tensor(f"{last}markov_head.markov_w1.weight")),
        "markov_out": ops.markov_out.prepare(loader.weights(last, ("markov_head.markov_w2",))),
        "confidence": ops.confidence.prepare(loader.weights(last, ("confidence_head.proj",))),
    }
