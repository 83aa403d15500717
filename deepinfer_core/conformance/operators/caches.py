"""Cache groups of a backend under test: allocated by its layout, poisoned, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from deepinfer_core.api import CacheEntry, CacheGroupSpec, KVLayoutRequest, LayerCache
from deepinfer_core.conformance.case import Mismatch
from deepinfer_core.conformance.compare import same_bits
from deepinfer_core.conformance.target import Target

from .operation import widened

PAGED = "paged"
"""The layout whose form is defined: ``[num_blocks, rows_per_block, *entry.shape]``."""


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """One layer's cache of a group on the device, and the definition's on the host, in float64.

    Attributes:
        layout: name of the layout the backend chose: operators are asked with the demand ``kv_layout:<layout>``.
        cache: on the device. oracle: on the host. rows: of a block.
    """

    spec: CacheGroupSpec
    layout: str
    cache: LayerCache
    oracle: dict[str, torch.Tensor]
    rows: int

    @property
    def demand(self) -> str:
        return f"kv_layout:{self.layout}"


def open_group(target: Target, spec: CacheGroupSpec, num_blocks: int, block_size: int) -> Group:
    """Allocate a group of one layer and fill it with NaN, null block included.

    Raises:
        Refused: no layout takes the group.
    """
    request = KVLayoutRequest(group=spec, block_size=block_size, device_type=target.device.info.type)
    chosen = target.choose(request)
    (cache,) = chosen.operator.allocate(num_blocks)
    wide = attrs.evolve(spec, entries=tuple(_wide(entry) for entry in spec.entries))
    (oracle,) = target.oracle(attrs.evolve(widened(request), group=wide)).allocate(num_blocks)
    poison(target, cache)
    for tensor in oracle.values():
        tensor.fill_(float("nan"))
    rows = block_size // spec.tokens_per_row
    return Group(spec=spec, layout=chosen.provider.name, cache=cache, oracle=dict(oracle), rows=rows)


def _wide(entry: CacheEntry) -> CacheEntry:
    return attrs.evolve(entry, dtype="float64")


def poison(target: Target, cache: LayerCache) -> None:
    """NaN wherever a cache holds floating point, and every bit set elsewhere."""

    def work() -> None:
        for tensor in cache.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1 if tensor.dtype.is_signed else 255)

    target.work(work)


def snapshot(target: Target, cache: LayerCache) -> dict[str, torch.Tensor]:
    """A host copy of all of a cache."""
    return {name: target.get(tensor) for name, tensor in cache.items()}


def check_unchanged(name: str, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Not a bit of a cache changed.

    Raises:
        Mismatch: naming the entry.
    """
    for entry, value in before.items():
        if not same_bits(value, after[entry]):
            raise Mismatch(f"{name}: wrote to the cache entry {entry!r}; expected it to be read only")


def check_rows(
    name: str, group: Group, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], slots: Any
) -> None:
    """Only the rows at ``slots`` (``block * rows + row``, any order) and the null block may have changed.

    Layouts of a form of their own are held to it by what attention reads from them.

    Raises:
        Mismatch: naming a row that was written without need.
    """
    if group.layout != PAGED:
        return
    for entry, value in before.items():
        may = torch.zeros(value.shape[:2], dtype=torch.bool)
        may[0] = True
        may.view(-1)[torch.as_tensor(slots, dtype=torch.int64)] = True
        old, new = value[~may], after[entry][~may]
        if not same_bits(old, new):
            rows = torch.arange(may.numel()).view(may.shape)[~may]
            changed = next(int(rows[i]) for i in range(len(rows)) if not same_bits(old[i], new[i]))
            raise Mismatch(
                f"{name}: wrote row {changed % group.rows} of block {changed // group.rows} of cache entry {entry!r}, "
                f"expected only the {len(may.view(-1)[group.rows :].nonzero())} rows of this step to change"
            )
