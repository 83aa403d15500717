"""Regions, each as its parts one after the other: what a plugin's operator for them must compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    AttentionInputsRequest,
    BuildContext,
    GatedLinearRequest,
    LayerCache,
    LinearRequest,
    RmsNormRequest,
    RopeRequest,
    StepLayout,
    SwigluRequest,
    WeightPart,
    WriteKVRequest,
)

from .attention import WriteKV
from .gemm import Linear, PackedLinear
from .pointwise import RmsNorm, Swiglu
from .rope import Rope


class AttentionInputs:
    """Norm of the heads, rotary embedding, cache write."""

    def __init__(self, request: AttentionInputsRequest, context: BuildContext) -> None:
        common: dict[str, Any] = {"device_type": request.device_type, "dtype": request.dtype}
        dim = request.head_dim
        self._request = request
        self._norm = None
        if request.norm_eps is not None:
            self._norm = RmsNorm(RmsNormRequest(hidden=dim, eps=request.norm_eps, **common), context)
        self._rope = Rope(
            RopeRequest(
                head_dim=dim,
                rotary_dim=dim,
                theta=request.theta,
                scaling=request.scaling,
                max_positions=request.max_positions,
                **common,
            ),
            context,
        )
        self._write = WriteKV(
            WriteKVRequest(
                cache_group=request.cache_group,
                kv_heads=request.kv_heads,
                head_dim=dim,
                cache_dtype=request.cache_dtype,
                block_size=request.block_size,
                **common,
            ),
            context,
        )

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
        self._linear = Linear(
            LinearRequest(
                in_features=request.in_features,
                out_features=2 * request.width,
                dtype=request.dtype,
                out_dtype=request.dtype,
                weight_dtype=request.weight_dtype,
                bias=request.bias,
                device_type=request.device_type,
            ),
            context,
        )
        self._swiglu = Swiglu(
            SwigluRequest(
                width=request.width, limit=request.limit, dtype=request.dtype, device_type=request.device_type
            ),
            context,
        )

    def prepare(self, weights: Sequence[WeightPart], bias: torch.Tensor | None = None) -> PackedLinear:
        """As ``gemm.linear``'s, gate first."""
        return self._linear.prepare(weights, bias)

    def run(self, x: torch.Tensor, weight: PackedLinear) -> torch.Tensor:
        """``[M, in_features]`` -> ``[M, width]``."""
        return self._swiglu.run(self._linear.run(x, weight))
