"""A plugin whose exchanges of experts between processes have one mistake each: the kit must name it.

Each is a provider of its own, asked for by name. It is loaded in every process of a group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, ProbeEnv, Provider, hookimpl, yes

BACKEND = "broken_exchange"
JOINS_WRONGLY = "joins_wrongly"
"""A backend whose device numbers its processes backwards."""

MISTAKES: dict[str, tuple[str, str, Callable[..., Any]]] = {}
"""Name -> the case that must fail, a part of the message, and what makes the exchange."""


class Wrapped:
    """An exchange with some methods replaced."""

    def __init__(self, right: Any, **methods: Callable[..., Any]) -> None:
        self._right = right
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


class Broken:
    """An operator whose ``place`` gives what the mistake makes of the right exchange."""

    def __init__(self, mistake: Callable[..., Any], request: Any, context: Any) -> None:
        self._right = context.reference(request)
        self._mistake, self._request, self._context = mistake, request, context
        self.memory: dict[str, Any] = {"place": self._right.place}

    def place(self, placement: Any) -> Any:
        right = self._right.place(placement)
        return self._mistake(right, self._context.group, placement, self.memory)


def mistake(case: str, says: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``(the right exchange, group, placement, memory of the operator) -> the broken one``, by its name."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        MISTAKES[make.__name__] = (f"moe_communication{case}", says, make)
        return make

    return register


@mistake("[2]/float32/round_trip", "weights of expert")
def expert_weight_dropped(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    def dispatch(*arguments: Any) -> Any:
        sent = right.dispatch(*arguments)
        weights = sent.weights.clone()
        weights[-1:] = 1.0
        return attrs.evolve(sent, weights=weights)

    return Wrapped(right, dispatch=dispatch)


@mistake("[2]/float32/counted_once", "found 3, expected 2.5")
def redundant_expert_counted_twice(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    """Every process sees all rows and answers for the experts it holds; what they answer is added up.

    A copy of an expert answers, too.
    """
    import torch
    import torch.distributed as dist

    from deepinfer_core.api import DispatchedRows

    def dispatch(x: Any, ids: Any, weights: Any) -> Any:
        everybody: list[Any] = [None] * group.size
        dist.all_gather_object(everybody, (x, ids, weights), group=group.handle)
        all_x, all_ids, all_weights = (torch.cat(parts) for parts in zip(*everybody, strict=True))
        held = [(all_ids == expert).nonzero(as_tuple=True) for expert in placement.slots[group.rank]]
        tokens = torch.cat([token for token, _ in held])
        first = sum(len(part[0]) for part in everybody[: group.rank])
        counts = torch.tensor([0, *(len(token) for token, _ in held)])
        return DispatchedRows(
            rows=all_x[tokens],
            weights=torch.cat([all_weights[where] for where in held]),
            offsets=counts.cumsum(0),
            handle=(tokens, len(all_x), slice(first, first + len(x))),
        )

    def combine(outputs: Any, handle: Any) -> Any:
        tokens, total, mine = handle
        summed = torch.zeros(total, outputs.shape[1]).index_add_(0, tokens, outputs.float())
        dist.all_reduce(summed, group=group.handle)
        return summed[mine].clone()

    return Wrapped(right, dispatch=dispatch, combine=combine)


@mistake("[2]/float32/round_trip", "combine, rank")
def results_left_in_order_of_slots(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    """They go back to the processes as they lie here: right where one process sent all of them."""
    import torch

    def combine(outputs: Any, handle: Any) -> Any:
        return right.combine(outputs, attrs.evolve(handle, arrived=torch.arange(len(outputs))))

    return Wrapped(right, combine=combine)


@mistake("[2]/float32/rank_without_experts", "rows")
def ranks_numbered_backwards(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    """Rows for rank 0 go to the last one, and the other way round."""
    return memory["place"](attrs.evolve(placement, slots=tuple(reversed(placement.slots))))


@mistake("[2]/float32/next_step", "rows of expert")
def rows_of_the_step_before(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    """A buffer that is filled again only when another number of rows arrives."""

    def dispatch(*arguments: Any) -> Any:
        sent = right.dispatch(*arguments)
        old = memory.get("rows")
        if old is None or len(old) != len(sent.rows):
            memory["rows"] = sent.rows
        return attrs.evolve(sent, rows=memory["rows"])

    return Wrapped(right, dispatch=dispatch)


@mistake("[2]/float32/experts_moved", "expert")
def moved_experts_not_noticed(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    return memory.setdefault("first", right)


@mistake("[2]/float32/batch_invariant", "as in other company")
def added_in_another_order_for_odd_steps(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    import torch

    def combine(outputs: Any, handle: Any) -> Any:
        if handle.tokens % 2 == 0:
            return right.combine(outputs, handle)
        top_k = len(handle.pairs) // handle.tokens
        turned = torch.arange(len(handle.pairs)).view(-1, top_k).flip(1).flatten()
        return right.combine(outputs, attrs.evolve(handle, pairs=turned[handle.pairs]))

    return Wrapped(right, combine=combine)


@mistake("[2]/float32/next_step", "a later step changed step 0's sums")
def sums_in_one_buffer(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    def combine(outputs: Any, handle: Any) -> Any:
        found = right.combine(outputs, handle)
        return memory.setdefault(tuple(found.shape), found).copy_(found)

    return Wrapped(right, combine=combine)


@mistake("[2]/float32/one_row", "changed its input 'x'")
def rows_scaled_in_place(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    def dispatch(x: Any, ids: Any, weights: Any) -> Any:
        sent = right.dispatch(x, ids, weights)
        x.mul_(2)
        return sent

    return Wrapped(right, dispatch=dispatch)


@mistake("[2]/float32/idle_rank", "did not come back")
def idle_rank_stays_away(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    """Without rows there is nothing to send, so it calls nobody; the others wait for it."""
    from deepinfer_core.api import DispatchedRows

    def dispatch(x: Any, ids: Any, weights: Any) -> Any:
        if len(x):
            return right.dispatch(x, ids, weights)
        return DispatchedRows(
            rows=x, weights=weights.flatten(), offsets=ids.new_zeros(placement.width + 1), handle=None
        )

    def combine(outputs: Any, handle: Any) -> Any:
        return outputs.float() if handle is None else right.combine(outputs, handle)

    return Wrapped(right, dispatch=dispatch, combine=combine)


@mistake("[2]/float32/round_trip", "rank 1 of 2 raised nothing and ended with exit code 7")
def process_ends(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    def dispatch(*arguments: Any) -> Any:
        if group.rank == 1:
            os._exit(7)
        return right.dispatch(*arguments)

    return Wrapped(right, dispatch=dispatch)


@mistake("[2]/float32/round_trip", "rank 1 of 2 raised OSError: link down")
def process_raises(right: Any, group: Any, placement: Any, memory: Any) -> Any:
    def dispatch(*arguments: Any) -> Any:
        if group.rank == 1:
            raise OSError("link down")
        return right.dispatch(*arguments)

    return Wrapped(right, dispatch=dispatch)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name=BACKEND)


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    devices = {BACKEND: "deepinfer_core.cpu.device:CpuDevice", JOINS_WRONGLY: "broken_join:Backwards"}
    return [
        DeviceInfo(
            backend=backend,
            type="cpu",
            arch="",
            count=1,
            memory=1 << 30,
            priority=-5,
            evidence="here",
            provider=LazyRef(device),
            fallback="allow",
        )
        for backend, device in devices.items()
    ]


@hookimpl
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        Provider(
            name=name,
            op="moe.expert_parallel",
            build=lambda request, context, make=make: Broken(make, request, context),
            caps=frozenset({"deterministic", "batch_invariant"}),
            supports=lambda request: yes(100),
            on_request=True,
        )
        for name, (_, _, make) in MISTAKES.items()
    ]
