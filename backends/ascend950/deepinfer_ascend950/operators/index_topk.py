"""``attention.index_topk`` with the scores by an own Triton kernel, and the choice by torch's stable sort.

``npu_lightning_indexer`` does both, but takes 16-bit weights where the contract has float32, and does not say which
entry wins a tie. The kernel is compared with the reference in Triton's interpreter and compiled to Ascend 950 IR; it
was not run on hardware, so it is chosen only when ``ops`` names it.
"""

from __future__ import annotations

import attrs
import torch

from deepinfer_ascend950.kernels.index_scores import index_scores
from deepinfer_core.api import BuildContext, IndexTopKRequest, LayerCache, StepLayout


@attrs.frozen(eq=False)
class _Plan:
    """Per query row: how many entries it sees ``[T]``, and its block table ``[T, B]`` int32."""

    visible: torch.Tensor
    block_table: torch.Tensor


class IndexTopK:
    """Top entries of every query."""

    def __init__(self, request: IndexTopKRequest, context: BuildContext) -> None:
        self._request = request

    def plan(self, layout: StepLayout) -> _Plan:
        """Entry e is visible to position t iff ``e < (t + 1) // rate``."""
        owner = torch.repeat_interleave(
            (layout.cu_seqlens[1:] - layout.cu_seqlens[:-1]).to(torch.int64), output_size=len(layout.positions)
        )
        blocks = -(-layout.max_seq_len // layout.block_size)
        return _Plan(
            visible=torch.div(layout.positions + 1, self._request.rate, rounding_mode="floor"),
            block_table=layout.block_table[:, :blocks].index_select(0, owner).contiguous(),
        )

    def run(self, query: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: _Plan) -> torch.Tensor:
        """``[T, heads, head_dim]`` and ``[T, heads]`` float32 -> ``[T, top_k]`` int64, ascending, -1 last."""
        r = self._request
        rows = r.block_size // r.rate
        tokens, blocks = plan.block_table.shape
        chosen = torch.full((tokens, r.top_k), -1, dtype=torch.int64, device=query.device)
        if not tokens or not blocks:
            return chosen
        scores = torch.empty((tokens, blocks * rows), dtype=torch.float32, device=query.device)
        index_scores[(tokens, blocks)](
            query.contiguous(),
            cache["key"],
            (weights * r.scale).contiguous(),
            plan.block_table,
            scores,
            blocks,
            H=r.heads,
            D=r.head_dim,
            N=rows,
        )
        picks = _best(scores, plan.visible, r.top_k)
        chosen[:, : picks.shape[1]] = picks
        return chosen


def _best(scores: torch.Tensor, visible: torch.Tensor, top_k: int) -> torch.Tensor:
    """Best visible entries of each row, ids ascending, -1 last. NaN loses to numbers, ties go to the lower id."""
    count = scores.shape[1]
    seen = torch.arange(count, device=scores.device) < visible[:, None]
    lowest = torch.finfo(scores.dtype).min
    ranked = torch.where(torch.isnan(scores), lowest, scores.clamp(min=lowest)).masked_fill(~seen, -torch.inf)
    picks = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]
    picks = torch.where(seen.gather(1, picks), picks, count).sort(dim=-1).values
    return picks.masked_fill(picks == count, -1)
