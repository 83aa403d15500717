"""What the plugin declares. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import CommandInfo, DrafterInfo, LazyRef, PluginInfo, hookimpl

from .settings import Settings

_HERE = "deepinfer_spec_decode"


def _drafter(name: str, help: str, factory: str) -> DrafterInfo:
    return DrafterInfo(
        name=name,
        help=help,
        factory=LazyRef(f"{_HERE}.{factory}"),
        needs=LazyRef(f"{_HERE}.needs:{name}"),
        schedule=LazyRef(f"{_HERE}.schedule:ConfidenceSchedule"),
    )


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(
        name="spec_decode",
        api=(1, 1),
        help="Speculative decoding: DSpark, DFlash, MTP, draft models, n-grams",
        settings=Settings,
    )


@hookimpl
def deepinfer_speculation() -> Sequence[DrafterInfo]:
    return [
        _drafter("ngram", "What followed the last tokens before; any model", "ngram:NGramDrafter"),
        _drafter("draft_model", "A smaller model of the same vocabulary", "draft_model:DraftModel"),
        _drafter("dspark", "DSpark or DFlash: a block at once from layers of the target", "dspark:BlockDrafter"),
        _drafter("mtp", "The next-token module of a DeepSeek checkpoint", "mtp:MTPDrafter"),
    ]


@hookimpl
def deepinfer_commands() -> Sequence[CommandInfo]:
    return [
        CommandInfo(
            name="calibrate-drafter",
            help="Fit a drafter's confidence on held-out prompts.",
            command=LazyRef(f"{_HERE}.calibrate:calibrate"),
        )
    ]
