"""The attention sub-layer: low-rank queries, one shared key-value vector, a window, pooled entries, a sink."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from deepinfer_core.api import ModelBatch, StepLayout

from .config import LayerKind, V4Config
from .groups import CSA, CSA_TAIL, HCA, HCA_TAIL, INDEX, INDEX_TAIL, WINDOW
from .weights import Loader


@attrs.frozen(kw_only=True, eq=False)
class Pooling:
    """Weights of one compressor, beside its projections: ``position_bias [rate, width]`` and ``norm``."""

    position_bias: torch.Tensor
    norm: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Attention:
    """One layer's attention.

    Attributes:
        group: cache group of its raw rows.
        window_index, entry_index: the layer's place in that group, and in the groups of its kind.
        unit: ones ``[head_dim]``: queries are normed without a weight.
        qdq_kv, qdq_index: roundings of cached values and index queries, None when they are off.
        pool: projections of all its compressors in one matrix. compressor, indexer, index_weights: or None.
    """

    config: V4Config
    ops: Any
    kind: LayerKind
    group: str
    window_index: int
    entry_index: int
    sinks: torch.Tensor
    unit: torch.Tensor
    qkv_a: Any
    q_norm: torch.Tensor
    q_b: Any
    kv_norm: torch.Tensor
    o_a: Any
    o_b: Any
    qdq_kv: Any = None
    qdq_index: Any = None
    pool: Any = None
    compressor: Pooling | None = None
    indexer: Pooling | None = None
    index_weights: Any = None

    @classmethod
    def load(
        cls,
        c: V4Config,
        ops: Any,
        loader: Loader,
        prefix: str,
        *,
        kind: LayerKind,
        group: str,
        window_index: int,
        entry_index: int,
    ) -> Attention:
        q_op = ops.q_b_csa if kind == "csa" else ops.q_b
        q_names = ("wq_b", "indexer.wq_b") if kind == "csa" else ("wq_b",)
        more: dict[str, Any] = {}
        if kind != "window":
            more["compressor"] = _pooling(loader, f"{prefix}compressor.")
        if kind == "hca":
            more["pool"] = ops.pool_hca.prepare(loader.weights(prefix, ("compressor.wkv", "compressor.wgate")))
        elif kind == "csa":
            owners = ("compressor", "indexer.compressor")
            names = [f"{owner}.{x}" for owner in owners for x in ("wkv", "wgate")]
            more["pool"] = ops.pool_csa.prepare(loader.weights(prefix, names))
            more["indexer"] = _pooling(loader, f"{prefix}indexer.compressor.")
            more["index_weights"] = ops.index_weights.prepare(loader.weights(prefix, ("indexer.weights_proj",)))
        return cls(
            config=c,
            ops=ops,
            kind=kind,
            group=group,
            window_index=window_index,
            entry_index=entry_index,
            sinks=loader.exact(f"{prefix}attn_sink"),
            unit=torch.ones(c.head_dim, dtype=loader.dtype, device=loader.device),
            qkv_a=ops.qkv_a.prepare(loader.weights(prefix, ("wq_a", "wkv"))),
            q_norm=loader.vector(f"{prefix}q_norm.weight"),
            q_b=q_op.prepare(loader.weights(prefix, q_names)),
            kv_norm=loader.vector(f"{prefix}kv_norm.weight"),
            o_a=ops.o_a.prepare(loader.weights(prefix, ("wo_a",))),
            o_b=ops.o_b.prepare(loader.weights(prefix, ("wo_b",))),
            qdq_kv=getattr(ops, "qdq_kv", None),
            qdq_index=getattr(ops, "qdq_index", None),
            **more,
        )

    def run(self, x: torch.Tensor, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        """``[T, hidden]``, normed -> ``[T, hidden]``; writes this layer's caches."""
        c, ops, kind = self.config, self.ops, self.kind
        rotation = plan["rope_window" if kind == "window" else "rope_compressed"]
        rope = ops.rope_window if kind == "window" else ops.rope_compressed
        attention = getattr(ops, f"attention_{kind}")
        low, kv = ops.qkv_a.run(x, self.qkv_a).split((c.q_rank, c.head_dim), dim=1)
        low = ops.q_norm.run(low, self.q_norm)
        query = (ops.q_b_csa if kind == "csa" else ops.q_b).run(low, self.q_b)
        self.write(kv, batch, rope, rotation, attention)
        chosen = None
        if kind != "window":
            self._pool(x, batch, plan)
        if kind == "csa":
            query, index_query = query.split((c.heads * c.head_dim, c.index_heads * c.index_dim), dim=1)
            chosen = self._choose(x, index_query, batch, plan)
        query = ops.head_norm.run(query.reshape(-1, c.heads, c.head_dim), self.unit)
        cache = batch.caches[self.group][self.window_index]
        entries = None if kind == "window" else batch.caches[kind][self.entry_index]
        attended = attention.run(
            rope.run(query, rotation), cache, entries, plan[f"attention_{kind}"], self.sinks, chosen
        )
        # Values were rotated with the keys: turning back by the query's own angle leaves relative positions only.
        attended = rope.run(attended, rotation, inverse=True)
        grouped = ops.o_a.run(attended.reshape(-1, c.o_groups, c.heads // c.o_groups * c.head_dim), self.o_a)
        out: torch.Tensor = ops.o_b.run(grouped.reshape(-1, c.o_groups * c.o_rank), self.o_b)
        return out

    def write(self, kv: torch.Tensor, batch: ModelBatch, rope: Any, rotation: Any, attention: Any) -> None:
        """Norm, rotate and keep one vector of each row, ``[T, head_dim]``."""
        kv = rope.run(self.ops.head_norm.run(kv, self.kv_norm)[:, None], rotation)[:, 0]
        if self.qdq_kv is not None:
            kv = self.qdq_kv.run(kv)
        attention.write(kv, batch.caches[self.group][self.window_index], batch.layouts[self.group])

    def _pool(self, x: torch.Tensor, batch: ModelBatch, plan: dict[str, Any]) -> None:
        """Feed the compressors: tail rows, and every entry that closes in this step."""
        c, ops, caches, at = self.config, self.ops, batch.caches, self.entry_index
        assert self.compressor is not None
        if self.kind == "hca":
            value, gate = ops.pool_hca.run(x.to(self.sinks.dtype), self.pool).split(c.head_dim, dim=1)
            ops.compress_hca.run(
                value,
                gate,
                caches[HCA_TAIL][at],
                caches[HCA][at],
                plan["compress_hca"],
                self.compressor.position_bias,
                self.compressor.norm,
            )
            return
        assert self.indexer is not None
        main, index = 2 * c.head_dim, 2 * c.index_dim
        pooled = ops.pool_csa.run(x.to(self.sinks.dtype), self.pool)
        value, gate, index_value, index_gate = pooled.split((main, main, index, index), dim=1)
        ops.compress_csa.run(
            value,
            gate,
            caches[CSA_TAIL][at],
            caches[CSA][at],
            plan["compress_csa"],
            self.compressor.position_bias,
            self.compressor.norm,
        )
        ops.compress_index.run(
            index_value,
            index_gate,
            caches[INDEX_TAIL][at],
            caches[INDEX][at],
            plan["compress_index"],
            self.indexer.position_bias,
            self.indexer.norm,
        )

    def _choose(self, x: torch.Tensor, query: torch.Tensor, batch: ModelBatch, plan: dict[str, Any]) -> torch.Tensor:
        """Ids of the entries each row attends to."""
        c, ops = self.config, self.ops
        query = ops.rope_index.run(query.reshape(-1, c.index_heads, c.index_dim), plan["rope_index"])
        if self.qdq_index is not None:
            query = self.qdq_index.run(query)
        weights = ops.index_weights.run(x, self.index_weights)
        chosen: torch.Tensor = ops.index_topk.run(
            query, weights, batch.caches[INDEX][self.entry_index], plan["index_topk"]
        )
        return chosen


def _pooling(loader: Loader, prefix: str) -> Pooling:
    return Pooling(position_bias=loader.exact(f"{prefix}ape"), norm=loader.vector(f"{prefix}norm.weight"))


def attention_plans(ops: Any, kinds: tuple[LayerKind, ...], batch: ModelBatch, group: str = WINDOW) -> dict[str, Any]:
    """Everything that is prepared once a step for all layers of these kinds; ``group`` keeps their raw rows."""
    layouts = batch.layouts
    window: StepLayout = layouts[group]
    plans: dict[str, Any] = {}
    if "window" in kinds:
        plans["rope_window"] = ops.rope_window.plan(batch.positions)
        plans["attention_window"] = ops.attention_window.plan(window)
    if "csa" in kinds or "hca" in kinds:
        plans["rope_compressed"] = ops.rope_compressed.plan(batch.positions)
    if "csa" in kinds:
        plans["rope_index"] = ops.rope_index.plan(batch.positions)
        plans["attention_csa"] = ops.attention_csa.plan(window, layouts[CSA])
        plans["compress_csa"] = ops.compress_csa.plan(layouts[CSA_TAIL], layouts[CSA])
        plans["compress_index"] = ops.compress_index.plan(layouts[INDEX_TAIL], layouts[INDEX])
        plans["index_topk"] = ops.index_topk.plan(layouts[INDEX])
    if "hca" in kinds:
        plans["attention_hca"] = ops.attention_hca.plan(window, layouts[HCA])
        plans["compress_hca"] = ops.compress_hca.plan(layouts[HCA_TAIL], layouts[HCA])
    return plans
