"""Regions, each as its parts one after the other: what a plugin's operator for them must compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    AttentionInputsRequest,
    BetweenAttentionRequest,
    BetweenPart,
    BetweenWeights,
    BuildContext,
    GatedLinearRequest,
    LayerCache,
    SampleTokensRequest,
    SamplingBatch,
    SamplingRequest,
    StepLayout,
    WeightPart,
)

from .attention import WriteKV
from .draw import Draw
from .gemm import Linear, PackedLinear
from .pointwise import RmsNorm, Swiglu
from .rope import Rope
from .stages import Temperature, TopK, TopP


class AttentionInputs:
    """Norm of the heads, rotary embedding, cache write."""

    def __init__(self, request: AttentionInputsRequest, context: BuildContext) -> None:
        self._request, norm = request, request.head_norm
        self._norm = None if norm is None else RmsNorm(norm, context)
        self._rope = Rope(request.rope, context)
        self._write = WriteKV(request.write_kv, context)

    def plan(self, layout: StepLayout) -> tuple[StepLayout, Any]:
        """The layout, and the angles of its rows."""
        return layout, self._rope.plan(layout.positions)

    def run(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        plan: tuple[StepLayout, Any],
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[T, (q_heads + 2 * kv_heads) * head_dim]`` -> queries ``[T, q_heads, head_dim]``."""
        layout, angles = plan
        heads, kv_heads = self._request.q_heads, self._request.kv_heads
        merged: Any = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, self._request.head_dim)
        query, key, value = merged.split((heads, kv_heads, kv_heads), dim=1)
        if self._norm is not None:
            if q_norm is None or k_norm is None:
                raise ValueError("norm_eps is set: run() needs q_norm and k_norm")
            query, key = self._norm.run(query, q_norm), self._norm.run(key, k_norm)
        query, key = self._rope.run(query, angles), self._rope.run(key, angles)
        self._write.run(key, value, cache, layout)
        return query


class GatedLinear:
    """Merged product, gated activation."""

    def __init__(self, request: GatedLinearRequest, context: BuildContext) -> None:
        self._linear = Linear(request.linear, context)
        self._swiglu = Swiglu(request.swiglu, context)

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedLinear:
        """As ``gemm.linear``'s, gate first."""
        return self._linear.prepare(weights, bias)

    def run(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, width]``."""
        return self._swiglu.run(self._linear.run(x, weight))


class BetweenAttention:
    """Product, residual sum, norm, gated layer, product, sum, norm, product."""

    def __init__(self, request: BetweenAttentionRequest, context: BuildContext) -> None:
        self._norm = RmsNorm(request.norm, context)
        self._parts: dict[BetweenPart, Linear | GatedLinear] = {
            "attention_out": Linear(request.attention_out, context),
            "gate_up": GatedLinear(request.gated, context),
            "down": Linear(request.down, context),
            "qkv": Linear(request.qkv, context),
        }

    def prepare(
        self, part: BetweenPart, weights: Sequence[WeightPart], bias: torch.Tensor | None = None
    ) -> PackedLinear:
        """As ``gemm.linear``'s."""
        return self._parts[part].prepare(weights, bias)

    def first(self, residual: torch.Tensor, norm: torch.Tensor, qkv: PackedLinear) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, merged]``."""
        return self._parts["qkv"].run(self._norm.run(residual, norm), qkv)

    def run(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: BetweenWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, merged]``, or ``[T, hidden]`` behind the last layer; and the sum ``[T, hidden]``."""
        parts = self._parts
        x = parts["attention_out"].run(attended, weights.attention_out)
        x, residual = self._norm.add(x, residual, weights.norm)
        x = parts["down"].run(parts["gate_up"].run(x, weights.gate_up), weights.down)
        x, residual = self._norm.add(x, residual, weights.next_norm)
        return (x if weights.next_qkv is None else parts["qkv"].run(x, weights.next_qkv)), residual


class SampleTokens:
    """Temperature, top-k, top-p, draw."""

    def __init__(self, request: SampleTokensRequest, context: BuildContext) -> None:
        def part(kind: Any, stage: str) -> Any:
            wanted = SamplingRequest(stage=stage, vocab_size=request.vocab_size, device_type=request.device_type)
            return kind(wanted, context)

        kinds = {"temperature": Temperature, "top_k": TopK, "top_p": TopP}
        self._stages = {stage: part(kind, stage) for stage, kind in kinds.items()}
        self._draw = part(Draw, "draw")

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 (not changed) -> ``[N]`` int64."""
        logits = logits[:, : batch.token_limit]
        for stage, part in self._stages.items():
            if stage in batch.active:
                logits = part.run(logits, batch)
        tokens: torch.Tensor = self._draw.run(logits, batch)
        return tokens
