"""A plan as rows for a table: what was chosen, by whom, and why not the others."""

from __future__ import annotations

from typing import Any

import attrs

from deepinfer_core.api import EnginePlan


def explain_plan(plan: EnginePlan) -> list[dict[str, Any]]:
    """One JSON-able row per slot: slot, op, layer_kind, phase, demands, provider, source, score, reason,
    proof, replaces, losers. ``proof``: tests that prove the demanded caps, with commas between; ``""`` when none is
    named. ``replaces``: of a region, its parts. Regions whose parts serve come last, with the provider ``parts``."""
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
            "proof": ", ".join(choice.proofs.values()),
            "replaces": list(choice.replaces),
            "losers": [attrs.asdict(loser) for loser in choice.losers],
        }
        for choice in (*plan.choices, *plan.declined)
    ]
