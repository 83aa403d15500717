"""One provider for everything a model asks for: layouts first, then regions, then operators."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from deepinfer_core.api import (
    CacheGroupSpec,
    Choice,
    FallbackPolicy,
    KVLayoutRequest,
    ModelSpec,
    OpRequest,
    Provider,
)
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import ChosenRegions, DeviceChoice, choose, choose_regions


def group_slot(group: CacheGroupSpec) -> str:
    """Slot name of a cache group's layout."""
    return f"kv_layout_{group.name}"


def layout_requests(config: EngineConfig, spec: ModelSpec, chosen: DeviceChoice) -> dict[str, OpRequest]:
    block_size, type_ = config.kv_cache.block_size, chosen.device.type
    return {
        group_slot(g): KVLayoutRequest(group=g, block_size=block_size, device_type=type_) for g in spec.cache_groups
    }


def model_requests(config: EngineConfig, spec: ModelSpec, chosen: DeviceChoice) -> dict[str, OpRequest]:
    """What may be chosen for a model: layouts, operators, regions."""
    regions = {slot: region.request for slot, region in spec.regions.items()}
    return {**layout_requests(config, spec, chosen), **spec.ops, **regions}


def choose_all(
    config: EngineConfig,
    spec: ModelSpec,
    requests: Mapping[str, OpRequest],
    providers: list[tuple[str, Provider]],
    chosen: DeviceChoice,
    fallback: FallbackPolicy,
) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """What was chosen, and the regions that were not.

    Layouts first: what they are called is a demand on everything that touches their groups. Then regions, which leave
    out operators.
    """
    layouts = layout_requests(config, spec, chosen)

    def decide(requests: Mapping[str, OpRequest]) -> tuple[Choice, ...]:
        return choose(requests, providers, user=config.ops, fallback=fallback, backend_plugin=chosen.plugin)

    decided = decide(layouts)
    names = {g.name: c.provider.partition(":")[2] for g, c in zip(spec.cache_groups, decided, strict=True)}

    def located(request: OpRequest) -> OpRequest:
        touched = {f"kv_layout:{names[group]}" for group in request.cache_groups}
        return attrs.evolve(request, demands=request.demands | touched) if touched else request

    rest = {slot: located(request) for slot, request in requests.items()}
    regions: ChosenRegions = choose_regions(
        {slot: attrs.evolve(region, request=located(region.request)) for slot, region in spec.regions.items()},
        rest,
        providers,
        user=config.ops,
        backend_plugin=chosen.plugin,
    )
    served = decide({slot: request for slot, request in rest.items() if slot in regions.left})
    return decided + regions.chosen + served, regions.declined
