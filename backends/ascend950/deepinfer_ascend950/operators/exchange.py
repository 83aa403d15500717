"""``moe.exchange`` inside one process by ``npu_moe_init_routing_v2``.

Relied on (its document): x ``[T, hidden]`` and expert ids ``[T, k]`` int32 give rows sorted by expert, ``[T * k,
hidden]``; with ``row_idx_type=0`` the index says for each of the ``T * k`` pairs, in order, at which of these rows it
lies; with ``expert_tokens_num_type=1`` and the flag set, the third result counts the rows of each expert. Dropless:
``drop_pad_mode=0``, ``active_num`` all rows, ``quant_mode=-1``; ``expert_num`` at most 10,240; float16, bfloat16,
float32.

The document does not say in which order the rows of one expert lie; the index does, so nothing here depends on it.
Results are added up in torch, in order of expert id and in float32: ``npu_moe_finalize_routing`` adds in the dtype
of the rows.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_core.api import BuildContext, DispatchedRows, MoeExchangeRequest

GATHER_INDEX = 0
COUNTS = 1
NOT_QUANTISED = -1


@attrs.frozen(eq=False)
class _Handle:
    """``places [T * top_k]`` int64: the row of each pair of token and expert."""

    places: torch.Tensor
    tokens: int


class LocalExchange:
    """Every expert is in this process."""

    def __init__(self, request: MoeExchangeRequest, context: BuildContext) -> None:
        self._request = request

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """``x [T, hidden]`` -> ``T * top_k`` rows, experts ascending."""
        r = self._request
        if not len(x):
            return DispatchedRows(
                rows=x,
                weights=weights.flatten(),
                offsets=ids.new_zeros(r.experts + 1),
                handle=_Handle(ids.flatten(), 0),
            )
        rows, index, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x.contiguous(),
            ids.to(torch.int32),
            active_num=ids.numel(),
            expert_capacity=-1,
            expert_num=r.experts,
            drop_pad_mode=0,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            quant_mode=NOT_QUANTISED,
            active_expert_range=[0, r.experts],
            row_idx_type=GATHER_INDEX,
        )
        places = index.to(torch.int64)
        sorted_weights = torch.empty_like(weights.flatten()).index_copy_(0, places, weights.flatten())
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        return DispatchedRows(rows=rows, weights=sorted_weights, offsets=offsets, handle=_Handle(places, x.shape[0]))

    def combine(self, outputs: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Each token's rows added in order of expert id, ``[T, hidden]`` float32."""
        r = self._request
        pairs = outputs.index_select(0, handle.places).to(torch.float32)
        return pairs.view(handle.tokens, r.top_k, r.hidden).sum(1)
