"""``moe.expert_parallel`` by torch's collectives, on any backend of theirs: counts, rows, weights, and results back.

Results are added up by the process that owns the token, in order of expert id and in float32. So its sum has the bits
of the exchange inside one process, however many processes there are and wherever the experts lie, as long as an expert
gives a row the same bits whatever rows are beside it.
"""

from __future__ import annotations

import math

import attrs
import torch
import torch.distributed as dist

from deepinfer_core.api import BuildContext, DispatchedRows, ExpertParallelRequest, ExpertPlacement, ProcessGroup

from .moe import added_in_order


class AllToAll:
    """Experts on the processes of a group."""

    def __init__(self, request: ExpertParallelRequest, context: BuildContext) -> None:
        if context.group is None or context.group.size != request.ranks:
            there = "no group" if context.group is None else f"a group of {context.group.size}"
            raise ValueError(f"ranks={request.ranks}: this process is in {there}; make a group of that many first")
        self._request, self._group, self._device = request, context.group, context.device

    def place(self, placement: ExpertPlacement) -> PlacedExchange:
        r = self._request
        if (placement.experts, placement.ranks, placement.width) != (r.experts, r.ranks, r.slots):
            raise ValueError(
                f"placement of {placement.experts} experts on {placement.ranks} ranks of {placement.width} slots: the "
                f"request says {r.experts} experts on {r.ranks} ranks of {r.slots}"
            )
        return PlacedExchange(r, self._group, placement, self._device)


@attrs.frozen(eq=False)
class _Handle:
    """What takes the way back.

    ``pairs [T * top_k]``: the pairs of token and expert in the order they were sent. ``arrived [N]``: the rows received
    in the order of slots. ``sent``, ``received``: rows to and from each rank.
    """

    pairs: torch.Tensor
    arrived: torch.Tensor
    sent: list[int]
    received: list[int]
    tokens: int


class PlacedExchange:
    """Rows go straight to a process that holds their expert; copies of an expert take rows in turn."""

    def __init__(
        self, request: ExpertParallelRequest, group: ProcessGroup, placement: ExpertPlacement, device: torch.device
    ) -> None:
        self._request, self._group = request, group
        homes: list[list[int]] = [[] for _ in range(request.experts)]
        for home, expert in enumerate(expert for row in placement.slots for expert in row):
            if expert >= 0:
                homes[expert].append(home)
        most = max(map(len, homes))
        self._homes = torch.tensor([found + [0] * (most - len(found)) for found in homes], device=device)
        self._copies = torch.tensor([len(found) for found in homes], device=device)

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """Rows of all processes for the slots here: slots ascending, within a slot by rank, then by token."""
        r, group, flat = self._request, self._group, ids.flatten()
        tokens = torch.arange(len(flat), device=flat.device) // r.top_k
        # Ranks begin with different copies, so that one row each does not fall on the same.
        homes = self._homes[flat, (tokens + group.rank) % self._copies[flat]]
        pairs = torch.sort(homes, stable=True).indices
        sent = torch.bincount(homes, minlength=r.ranks * r.slots).view(r.ranks, r.slots)
        found = self._to_all(sent, [1] * r.ranks, [1] * r.ranks)
        to, by = sent.sum(1).tolist(), found.sum(1).tolist()
        rows = self._to_all(x[tokens[pairs]], to, by)
        shares = self._to_all(weights.flatten()[pairs], to, by)
        slots = torch.arange(r.slots, device=found.device).repeat(r.ranks)
        arrived = torch.sort(slots.repeat_interleave(found.flatten()), stable=True).indices
        offsets = torch.cat((found.new_zeros(1), found.sum(0).cumsum(0)))
        handle = _Handle(pairs, arrived, to, by, x.shape[0])
        return DispatchedRows(rows=rows[arrived], weights=shares[arrived], offsets=offsets, handle=handle)

    def combine(self, outputs: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """Each of this process's tokens: its results added in order of expert id, in float32."""
        returning = torch.empty_like(outputs)
        returning[handle.arrived] = outputs
        back = self._to_all(returning, handle.received, handle.sent)
        pairs = torch.empty(back.shape, dtype=torch.float32, device=back.device)
        pairs[handle.pairs] = back.to(torch.float32)
        return added_in_order(pairs.view(handle.tokens, self._request.top_k, self._request.hidden))

    def _to_all(self, rows: torch.Tensor, to: list[int], by: list[int]) -> torch.Tensor:
        """``to[r]`` rows to rank r, ``by[r]`` rows from it, of any dtype: they travel as bytes."""
        wire = rows.to(self._group.device_type).contiguous()
        arrived = torch.empty((sum(by), *rows.shape[1:]), dtype=rows.dtype, device=wire.device)
        dist.all_to_all_single(_bytes(arrived), _bytes(wire), by, to, group=self._group.handle)
        return arrived.to(rows.device)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    width = math.prod(rows.shape[1:])
    if not len(rows):  # strides of nothing are nothing that a view can rely on
        return rows.new_empty((0, width * rows.element_size()), dtype=torch.uint8)
    return rows.view(len(rows), width).view(torch.uint8)
