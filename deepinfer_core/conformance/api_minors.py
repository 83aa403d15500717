"""Which minor of the interface brought which names, so that a plugin's declared range can be checked."""

from __future__ import annotations

from collections.abc import Mapping

ADDED: Mapping[tuple[int, int], frozenset[str]] = {
    (1, 1): frozenset(
        {
            "AttentionInputs",
            "AttentionInputsRequest",
            "BetweenAttention",
            "BetweenAttentionRequest",
            "BetweenPart",
            "BetweenWeights",
            "CapturesGraphs",
            "CommandHost",
            "CompiledConstraint",
            "ConstraintCompiler",
            "ConstraintInfo",
            "ConstraintKind",
            "ConstraintSpec",
            "ConstraintState",
            "DeviceDrafter",
            "DraftModuleSpec",
            "DraftSchedule",
            "DraftStep",
            "DrafterContext",
            "DrafterNeeds",
            "ExpertParallel",
            "ExpertParallelRequest",
            "ExpertPlacement",
            "ExpertShare",
            "FRESH_TOKENS",
            "GatedLinear",
            "GatedLinearRequest",
            "Graph",
            "JoinsGroups",
            "JudgedRows",
            "MaskJob",
            "MeasureStep",
            "NoDevice",
            "PARTS",
            "ProcessGroup",
            "Proposal",
            "Region",
            "SAMPLED_TOGETHER",
            "SampleTokens",
            "SampleTokensRequest",
            "TappedModel",
            "Verify",
            "VerifyCost",
            "Vocabulary",
            "deepinfer_constraints",
            "deepinfer_fused",
        }
    )
}
"""Minor -> the public names of ``deepinfer_core.api`` and the hooks that it added. Everything else came with 1.0."""


def added_in(name: str) -> tuple[int, int]:
    """The interface version that brought a public name or a hook."""
    return next((minor for minor, names in ADDED.items() if name in names), (1, 0))
