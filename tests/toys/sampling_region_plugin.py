"""A plugin with the region that samples: the reference's, which counts its calls in ``CALLS``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepinfer_core.api import (
    DeviceInfo,
    LazyRef,
    PluginInfo,
    Provider,
    SampleTokensRequest,
    SamplingBatch,
    hookimpl,
    yes,
)

CALLS: Counter[frozenset[str]] = Counter()
"""Active stages -> calls."""


class SampleTokens:
    def __init__(self, request: SampleTokensRequest, context: Any) -> None:
        self._right = context.reference(request)

    def run(self, logits: Any, batch: SamplingBatch) -> Any:
        CALLS[batch.active] += 1
        return self._right.run(logits, batch)


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="sampling_region_plugin", help="a region that counts")


@hookimpl
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:
    return [
        Provider(
            name="sample_tokens",
            op=SampleTokensRequest.op,
            build=LazyRef("toys.sampling_region_plugin:SampleTokens"),
            caps=frozenset({"deterministic", "spec_verify", "device_state"}),
            supports=lambda _: yes(500),
        )
    ]
