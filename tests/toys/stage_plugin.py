"""A plugin that adds a sampling stage, ``ban_below``, and has its own form of a built-in one, ``bias``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_core.api import (
    DeviceInfo,
    PluginInfo,
    Provider,
    SamplingBatch,
    SamplingRequest,
    StageArgument,
    StageInfo,
    Supports,
    hookimpl,
    no,
    yes,
)


class BanBelow:
    """``extra_args={"ban_below": n}`` removes ids 0 to n-1."""

    def __init__(self, request: SamplingRequest, context: Any) -> None:
        self.ids = torch.arange(request.vocab_size, device=context.device)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        bound = batch.state.extra["ban_below"][batch.slots]
        if (bound == 13).any():
            raise RuntimeError("thirteen")
        return logits.masked_fill(self.ids < bound[:, None], float("-inf"))


class DoubleBias:
    """In place of the bias stage: every bias counts twice."""

    def __init__(self, request: SamplingRequest, context: Any) -> None:
        self.reference = context.reference(request)

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        result: torch.Tensor = self.reference.run(self.reference.run(logits, batch), batch)
        return result


def supports_bias(request: SamplingRequest) -> Supports:
    return yes(0) if request.stage == "bias" else no(f"serves stage bias, not {request.stage}")


def supports(request: SamplingRequest) -> Supports:
    return yes(50) if request.stage == "ban_below" else no(f"serves stage ban_below, not {request.stage}")


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="stage_plugin", help="Adds a sampling stage")


@hookimpl
def deepinfer_sampling_stages() -> Sequence[StageInfo]:
    bound = StageArgument(off=0.0, low=0.0, high=64.0, help="lowest id allowed")
    return [StageInfo(name="ban_below", after="penalties", arguments={"ban_below": bound})]


@hookimpl
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:
    caps = frozenset({"spec_verify"})  # not device_state: auto then stays synchronous, and true is refused
    return [
        Provider(name="ban_below", op="sampling.stage", build=BanBelow, caps=caps, supports=supports),
        Provider(
            name="double_bias",
            op="sampling.stage",
            build=DoubleBias,
            caps=caps | {"device_state"},
            supports=supports_bias,
        ),
    ]
