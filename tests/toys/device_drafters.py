"""Drafters that work on the device, right or wrong to order. Loaded through ``plugins.paths``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from deepinfer_core.api import (
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DraftStep,
    LazyRef,
    PluginInfo,
    Proposal,
    Verified,
    hookimpl,
)

TEXTS: list[list[int]] = []
"""Whole right texts, prompt and continuation; what follows a row is found by its beginning."""

ALL = 10**6
HERE = "toys.device_drafters"


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """``right``: drafts that are right, from the first; -1: another number each time. ``vocab``: wrong ones are below.

    ``certain``: with one-hot drafts; otherwise with a distribution that ``choose`` drew from. ``gap``: the number of a
    draft that is no token.
    """

    right: int = ALL
    vocab: int = 64
    seed: int = 0
    every: int = 0
    gap: int = ALL
    certain: bool = True
    confidence: Literal["none", "zero", "one", "nan", "random"] = "none"


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="device_drafters", help="Toy drafters for tests", settings=DeviceSettings)


@hookimpl
def deepinfer_speculation() -> Sequence[DrafterInfo]:
    return [
        DrafterInfo(
            name="told", help="", factory=LazyRef(f"{HERE}:Told"), needs=LazyRef(f"{HERE}:needs"),
            schedule=LazyRef(f"{HERE}:OddSchedule"),
        )
    ]  # fmt: skip


def needs(settings: DeviceSettings, target: Mapping[str, Any]) -> DrafterNeeds:
    return DrafterNeeds(reads="history")


class Told:
    """Proposes what comes next in :data:`TEXTS`, the first ``right`` of them unchanged."""

    def __init__(self, settings: DeviceSettings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.heard: list[Verified] = []
        self.steps = 0

    def start(self, context: DrafterContext) -> None:
        self.context = context

    def absorb(self, step: DraftStep) -> None:
        self.steps += 1
        if self.settings.every and self.steps % self.settings.every == 0:
            raise RuntimeError("absorb fails")

    def propose(self, step: DraftStep) -> Proposal:
        drafts = torch.tensor([self._row(step, i) for i in range(len(step.host_anchors))], device=step.slots.device)
        drafts[:, self.settings.gap : self.settings.gap + 1] = -1
        confidence = self._confidence(drafts)
        if self.settings.certain:
            return Proposal(tokens=drafts, confidence=confidence)
        tokens, kept = [], []
        for j in range(step.depth):
            peaked = torch.nn.functional.one_hot(drafts[:, j].clamp(min=0), self.context.vocab_size) * 2.0
            chosen, scores = step.choose(peaked, j)
            tokens.append(chosen)
            kept.append(scores)
        scores = None if kept[0] is None else torch.stack([k for k in kept if k is not None], 1)
        return Proposal(tokens=torch.stack(tokens, 1), confidence=confidence, scores=scores)

    def verified(self, results: Sequence[Verified]) -> None:
        self.heard += results

    def _row(self, step: DraftStep, row: int) -> list[int]:
        past = step.state.history[step.slots[row], : int(step.anchors[row]) + 1].tolist()
        text = next((text for text in TEXTS if text[: len(past)] == past), past)
        right = self.settings.right if self.settings.right >= 0 else self.random.randrange(step.depth + 1)
        following = (text[len(past) : len(past) + step.depth] + [0] * step.depth)[: step.depth]
        return [t if j < right else (t + 1 + j) % self.settings.vocab for j, t in enumerate(following)]

    def _confidence(self, drafts: torch.Tensor) -> torch.Tensor | None:
        match self.settings.confidence:
            case "none":
                return None
            case "random":
                return torch.tensor([[self.random.random() for _ in row] for row in drafts], device=drafts.device)
        value = {"zero": 0.0, "one": 1.0, "nan": float("nan")}[self.settings.confidence]
        return torch.full(drafts.shape, value, device=drafts.device)


class OddSchedule:
    """Any budget, any allocation, drafting now and then: whatever a schedule says, tokens stay the same."""

    def __init__(self, settings: DeviceSettings) -> None:
        self.random = random.Random(settings.seed)
        self.costs: list[Any] = []

    def start(self, measure: Any, rows: Sequence[int], key: Mapping[str, str]) -> str:
        self.measured = {count: measure(count) for count in rows[:3]}
        return f"measured {len(self.measured)} sizes"

    def budget(self, survival: Any, caps: Any, rows: int, *, delayed: bool) -> int:
        return self.random.choice([-1, 0, 1, 2, 5, 10**6])

    def drafts(self, requests: int, fresh: int) -> int:
        return self.random.choice([requests, requests, self.random.randrange(-1, requests + 2)])

    def allocate(self, survival: Any, caps: Any, total: int) -> Any:
        order = list(range(len(caps)))
        self.random.shuffle(order)
        counts = caps * 0
        for i in order:
            counts[i] = min(int(caps[i]), total - int(counts.sum()), self.random.randrange(9))
        return counts

    def observe(self, cost: Any) -> None:
        self.costs.append(cost)
