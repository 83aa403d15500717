"""The expert sub-layer: a router, routed experts, one shared expert."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import ExpertShare, WeightPart

from .config import V4Config
from .weights import Loader


@attrs.frozen(kw_only=True, eq=False)
class Experts:
    """One layer's experts: all of them, or the ones in this process's slots.

    Attributes:
        exchange: carries rows to them and back.
        bias: ``[experts]`` float32, or None where experts are given by token.
        table: ``[vocab, experts_per_token]`` int64: the experts of each token id, or None.
        counts: ``[experts + 1]`` int64: rows sent to each expert so far; last, rows whose scores were all NaN.
    """

    ops: Any
    exchange: Any
    router: Any
    bias: torch.Tensor | None
    table: torch.Tensor | None
    gate_up: Any
    down: Any
    shared_gate_up: Any
    shared_down: Any
    wide: torch.dtype
    counts: torch.Tensor

    @classmethod
    def load(
        cls,
        c: V4Config,
        ops: Any,
        loader: Loader,
        prefix: str,
        hashed: bool,
        counts: torch.Tensor,
        share: ExpertShare | None = None,
    ) -> Experts:
        """Read one layer. An empty slot gets no rows, but its operator wants weights: those of expert 0."""
        held = range(c.experts) if share is None else [max(expert, 0) for expert in share.held]

        def routed(names: tuple[str, ...]) -> list[list[WeightPart]]:
            parts = {expert: loader.weights(f"{prefix}experts.{expert}.", names) for expert in dict.fromkeys(held)}
            return [parts[expert] for expert in held]

        shared = f"{prefix}shared_experts."
        return cls(
            ops=ops,
            exchange=ops.exchange if share is None else ops.exchange.place(share.placement),
            router=ops.router.prepare([loader.weight(f"{prefix}gate.weight")]),
            bias=None if hashed else loader.exact(f"{prefix}gate.bias"),
            table=loader.tensor(f"{prefix}gate.tid2eid").to(loader.device, torch.int64) if hashed else None,
            gate_up=ops.expert_gate_up.prepare(routed(("w1", "w3"))),
            down=ops.expert_down.prepare(routed(("w2",))),
            shared_gate_up=ops.shared_gate_up.prepare(loader.weights(shared, ("w1", "w3"))),
            shared_down=ops.shared_down.prepare(loader.weights(shared, ("w2",))),
            wide=torch.float64 if loader.dtype == torch.float64 else torch.float32,
            counts=counts,
        )

    def run(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]``, normed, and the rows' own token ids -> ``[T, hidden]``."""
        ops = self.ops
        logits = ops.router.run(x.to(self.wide), self.router)
        if self.table is not None:
            ids, weights = ops.route_hashed.run(logits, given=self.table[token_ids], counts=self.counts)
        else:
            ids, weights = ops.route.run(logits, self.bias, counts=self.counts)
        sent = self.exchange.dispatch(x, ids, weights)
        inner = ops.swiglu.run(ops.expert_gate_up.run(sent.rows, sent.offsets, self.gate_up))
        inner = (inner * sent.weights[:, None]).to(x.dtype)
        routed = self.exchange.combine(ops.expert_down.run(inner, sent.offsets, self.down), sent.handle)
        inner = ops.swiglu.run(ops.shared_gate_up.run(x, self.shared_gate_up)).to(x.dtype)
        shared = ops.shared_down.run(inner, self.shared_down)
        out: torch.Tensor = (routed + shared).to(x.dtype)
        return out
