"""A drafter that is right for exactly so many tokens, told what is right beforehand. Loaded by ``plugins.paths``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from deepinfer_core.api import Draft, DrafterInfo, DraftRow, LazyRef, PluginInfo, Verified, hookimpl

TEXTS: list[list[int]] = []
"""Whole right texts, prompt and continuation; what follows a row is found by its beginning."""


@attrs.define
class Plan:
    """``depth`` drafts, the first ``right`` of them right. ``seen``: (proposed, accepted) of every verified step."""

    depth: int = 0
    right: int = 0
    vocab: int = 128
    seen: list[tuple[int, int]] = attrs.field(factory=list)


PLAN = Plan()


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="right_for", help="Drafts right for exactly so many tokens")


@hookimpl
def deepinfer_speculation() -> Sequence[DrafterInfo]:
    return [DrafterInfo(name="right_for", help="", factory=LazyRef("v4.right_for_drafter:RightFor"))]


class RightFor:
    """Proposes ``PLAN.depth`` tokens."""

    def __init__(self, settings: Any) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        return [Draft(tokens=self._drafts(row.tokens.tolist())) for row in rows]

    def verified(self, results: Sequence[Verified]) -> None:
        PLAN.seen += [(result.proposed, result.accepted) for result in results]

    def forget(self, request_id: str, child: int) -> None:
        pass

    def _drafts(self, past: list[int]) -> list[int]:
        text = next((text for text in TEXTS if text[: len(past)] == past), past)
        following = [*text[len(past) : len(past) + PLAN.depth]]
        following += [0] * (PLAN.depth - len(following))
        return [t if i < PLAN.right else (t + 1) % PLAN.vocab for i, t in enumerate(following)]
