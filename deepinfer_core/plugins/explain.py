"""A plan as rows for a table: what was chosen, by whom, and why not the others."""

from __future__ import annotations

from typing import Any

import attrs

from deepinfer_core.api import PARTS, Choice, EnginePlan

UNPROVED = "claimed, no test named"


def explain_plan(plan: EnginePlan) -> list[dict[str, Any]]:
    """One JSON-able row per slot: slot, op, layer_kind, phase, demands, provider, source, score, reason,
    proof, replaces, losers. ``proof``: tests that prove the demanded caps, with commas between, and of a feature's cap
    without one that it is only claimed; ``""`` when nothing calls for one. ``replaces``: of a region, its parts.
    Regions whose parts serve come last, with the provider ``parts``."""
    return [
        {
            "slot": choice.slot,
            "op": choice.op,
            "layer_kind": choice.request.get("layer_kind", ""),
            "phase": choice.request.get("phase", ""),
            "demands": list(choice.request.get("demands", ())),
            "provider": choice.provider,
            "source": choice.source,
            "score": choice.score,
            "reason": choice.reason,
            "proof": ", ".join((*choice.proofs.values(), *(f"{cap}: {UNPROVED}" for cap in _claims(plan, choice)))),
            "replaces": list(choice.replaces),
            "losers": [attrs.asdict(loser) for loser in choice.losers],
        }
        for choice in (*plan.choices, *plan.declined)
    ]


def unproved(plan: EnginePlan) -> list[str]:
    """One line for each provider that claims a switched-on feature's cap and names no test for it."""
    slots: dict[tuple[str, str], list[str]] = {}
    for choice in plan.choices:
        for cap in _claims(plan, choice):
            slots.setdefault((cap, choice.provider), []).append(choice.slot)
    return [
        f"features.{cap}: {provider} claims {cap} for {', '.join(names)} and names no test that proves it "
        "(Provider.proofs); ask its author, or choose another in ops"
        for (cap, provider), names in slots.items()
    ]


def _claims(plan: EnginePlan, choice: Choice) -> list[str]:
    """Caps of switched-on features that this choice has to have, without a test."""
    demands = choice.request.get("demands", ())
    named = choice.provider != PARTS
    return [cap for cap in plan.features if named and cap in demands and cap not in choice.proofs]
