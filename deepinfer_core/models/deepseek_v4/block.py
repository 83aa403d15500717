"""One layer: attention and experts, each between the mixing of the residual streams."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import ExpertShare, ModelBatch

from .attention import Attention
from .config import LayerKind, V4Config
from .experts import Experts
from .weights import Loader


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """A layer, or a draft stage."""

    ops: Any
    attention: Attention
    experts: Experts
    attention_norm: torch.Tensor
    expert_norm: torch.Tensor
    attention_mixing: Any
    expert_mixing: Any

    @classmethod
    def load(
        cls,
        c: V4Config,
        ops: Any,
        loader: Loader,
        prefix: str,
        *,
        kind: LayerKind,
        hashed: bool,
        group: str,
        window_index: int,
        entry_index: int,
        share: ExpertShare | None = None,
    ) -> Block:
        counts = torch.zeros(c.experts + 1, dtype=torch.int64, device=loader.device)
        return cls(
            ops=ops,
            attention=Attention.load(
                c,
                ops,
                loader,
                f"{prefix}attn.",
                kind=kind,
                group=group,
                window_index=window_index,
                entry_index=entry_index,
            ),
            experts=Experts.load(c, ops, loader, f"{prefix}ffn.", hashed, counts, share),
            attention_norm=loader.vector(f"{prefix}attn_norm.weight"),
            expert_norm=loader.vector(f"{prefix}ffn_norm.weight"),
            attention_mixing=_mixing(ops.hyper, loader, f"{prefix}hc_attn_"),
            expert_mixing=_mixing(ops.hyper, loader, f"{prefix}hc_ffn_"),
        )

    def run(self, streams: torch.Tensor, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        """``[T, streams, hidden]`` -> the same."""
        ops = self.ops
        x, mixed = ops.hyper.mix(streams, self.attention_mixing)
        x = self.attention.run(ops.norm.run(x, self.attention_norm), batch, plan)
        streams = ops.hyper.merge(streams, x, mixed)
        x, mixed = ops.hyper.mix(streams, self.expert_mixing)
        x = self.experts.run(ops.norm.run(x, self.expert_norm), batch.token_ids)
        merged: torch.Tensor = ops.hyper.merge(streams, x, mixed)
        return merged


def _mixing(op: Any, loader: Loader, prefix: str) -> Any:
    return op.prepare(*(loader.exact(f"{prefix}{part}") for part in ("fn", "base", "scale")))


def load_head(op: Any, loader: Loader, prefix: str) -> Any:
    """Weights of the streams' last sum."""
    return _mixing(op, loader, f"{prefix}hc_head_")
