"""The scheduling policy that a plugin declared, made for an engine."""

from __future__ import annotations

from typing import Any

from deepinfer_core.api import Policy, PolicyInfo
from deepinfer_core.plugins import guarded

QUESTIONS = ("admit", "order", "split", "victims", "on_event")
"""Methods of ``Policy``."""


def make_policy(plugin: str, info: PolicyInfo, settings: Any) -> Policy:
    """An instance of what ``plugin`` declared. PluginError if it cannot be made, or does not answer every question."""
    made: Policy = guarded(
        f"scheduling.policy {info.name!r}", plugin, info.factory, lambda: info.factory.load()(settings), QUESTIONS
    )
    return made
