"""One provider for everything a model asks for: layouts first, then regions, then operators."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from deepinfer_core.api import (
    Choice,
    FallbackPolicy,
    KVLayoutRequest,
    ModelSpec,
    OpRequest,
    Provider,
    Region,
)
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import ChosenRegions, DeviceChoice, choose, choose_regions

from .layout_choice import Located, Providers, choose_with_layouts, group_slot


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
    regions: Mapping[str, Region] | None = None,
) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    """What was chosen, and the regions that were not: of ``regions``, by default the model's.

    Layouts first: what they are called is a demand on everything that touches their groups. Then regions, which leave
    out operators.
    """

    offered = spec.regions if regions is None else regions

    def decide(requests: Mapping[str, OpRequest], providers: Providers) -> tuple[Choice, ...]:
        return choose(requests, providers, user=config.ops, fallback=fallback, backend_plugin=chosen.plugin)

    def complete(located: Located) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
        rest = {slot: located(request) for slot, request in requests.items()}
        fused: ChosenRegions = choose_regions(
            {slot: attrs.evolve(region, request=located(region.request)) for slot, region in offered.items()},
            rest,
            providers,
            user=config.ops,
            backend_plugin=chosen.plugin,
        )
        served = decide({slot: request for slot, request in rest.items() if slot in fused.left}, providers)
        return fused.chosen + served, fused.declined

    decided, (others, declined) = choose_with_layouts(
        layout_requests(config, spec, chosen), requests, providers, decide, complete
    )
    return decided + others, declined
