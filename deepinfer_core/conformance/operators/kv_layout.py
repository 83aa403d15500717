"""Layouts: the memory of cache groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, KVLayoutRequest, LayerCache
from deepinfer_core.conformance.case import Case, Mismatch, Tier
from deepinfer_core.conformance.target import Target

from .caches import PAGED
from .steps import BLOCK

BLOCKS = 5


def _layout(spec: CacheGroupSpec, target: Target) -> str:
    """Bytes as announced, one zero-filled cache a layer, on the device, each with its own memory."""
    request = KVLayoutRequest(group=spec, block_size=BLOCK, device_type=target.device.info.type)
    chosen = target.choose(request)
    label = f"kv_layout.paged by {chosen.label}"
    announced, caches = chosen.operator.block_bytes(), chosen.operator.allocate(BLOCKS)
    if len(caches) != spec.layers:
        raise Mismatch(f"{label}: found {len(caches)} caches, expected one for each of {spec.layers} layers")
    names = {entry.name for entry in spec.entries}
    taken = 0
    places = set()
    for layer, cache in enumerate(caches):
        if chosen.provider.name == PAGED and set(cache) != names:
            raise Mismatch(f"{label}, layer {layer}: found entries {sorted(cache)}, expected {sorted(names)}")
        for name, tensor in cache.items():
            if tensor.device.type != target.device.torch_device.type:
                where = target.device.torch_device
                raise Mismatch(f"{label}, layer {layer}, entry {name!r}: found on {tensor.device}, expected {where}")
            if target.get(tensor).view(torch.uint8).any():
                raise Mismatch(f"{label}, layer {layer}, entry {name!r}: found other bytes, expected zeros")
            taken += tensor.numel() * tensor.element_size()
            places.add((tensor.data_ptr(), tensor.numel()))
    if taken != announced * BLOCKS:
        raise Mismatch(f"{label}: {BLOCKS} blocks took {taken} bytes; expected {BLOCKS} * block_bytes()={announced}")
    if len(places) != sum(len(cache) for cache in caches):
        raise Mismatch(f"{label}: two layers share memory, expected {len(caches)} caches apart")
    if chosen.provider.name == PAGED:
        _check_form(label, spec, caches[0])
    return chosen.label


def _check_form(label: str, spec: CacheGroupSpec, cache: LayerCache) -> None:
    for entry in spec.entries:
        expected = (BLOCKS, BLOCK // spec.tokens_per_row, *entry.shape)
        found = cache[entry.name]
        if tuple(found.shape) != expected or found.dtype != getattr(torch, entry.dtype):
            raise Mismatch(
                f"{label}, entry {entry.name!r}: found {tuple(found.shape)} {found.dtype}, "
                f"expected {expected} {entry.dtype}"
            )


def cases(dtype: str) -> Iterator[Case]:
    """Every case of this operator."""
    pair = tuple(CacheEntry(name, (2, 64), dtype) for name in ("key", "value"))
    tail = tuple(CacheEntry(name, (64,), "float32") for name in ("value", "score"))
    groups: tuple[tuple[str, Tier, CacheGroupSpec], ...] = (
        ("full", "boots", CacheGroupSpec(name="full", layers=2, entries=pair)),
        ("window", "serves", CacheGroupSpec(name="window", kind="window", window=24, layers=2, entries=pair)),
        (
            "entries",
            "full",
            CacheGroupSpec(name="csa", layers=2, entries=(CacheEntry("kv", (64,), dtype),), tokens_per_row=4),
        ),
        ("tail", "full", CacheGroupSpec(name="tail", kind="window", window=8, layers=2, entries=tail)),
    )
    for name, tier, spec in groups:
        yield Case(
            id=f"kv_layout.paged/{dtype}/{name}",
            family="kv_layout",
            tier=tier,
            check=partial(_layout, spec),
            required=True,
        )
