"""The engine plan as plugins see it: plain data, fixed before weights load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs


@attrs.frozen(kw_only=True)
class PluginInfo:
    """Declared by ``deepinfer_plugin``, once per plugin.

    Attributes:
        name: what users write (``DEEPINFER_PLUGINS``, ``--no-plugin``, ``plugin:provider``).
        api: oldest minor of the interface it needs, as (major, minor).
        help: one line for ``deepinfer plugins``.
        needs: names of plugins that must be loaded too.
        conflicts: names of plugins that must not be loaded together with it.
        archs: values of ``DeviceInfo.arch`` that the package's binaries were built for; empty: all, or not said.
        settings: an attrs class of typed settings with defaults, read from ``plugins.<name>`` and
            ``DEEPINFER_<NAME>__<FIELD>``, or None.
    """

    name: str
    api: tuple[int, int] = (1, 0)
    help: str = ""
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    settings: type | None = None


@attrs.frozen(kw_only=True)
class PluginRecord:
    """A loaded plugin, as the plan remembers it; workers refuse to start on another version."""

    name: str
    distribution: str
    version: str
    entry_point: str


@attrs.frozen(kw_only=True)
class Loser:
    """A provider that was not chosen, and why."""

    provider: str
    reason: str
    score: int | None = None


@attrs.frozen(kw_only=True)
class Choice:
    """The provider of one slot.

    Attributes:
        slot: the model's or engine's name for it.
        op: operator. request: the request's fields, as plain data.
        provider: ``plugin:provider``. score, reason: its verdict.
        source: who decided: the user's list, the provider's score, or the reference as fallback.
        losers: every other candidate.
        replaces: of a region, the slots it takes the place of.
        proofs: demanded cap -> the test that proves it for this provider (``Provider.proofs``).
    """

    slot: str
    op: str
    request: Mapping[str, Any]
    provider: str
    score: int
    reason: str
    source: Literal["user", "score", "reference"]
    losers: tuple[Loser, ...] = ()
    proofs: Mapping[str, str] = attrs.field(factory=dict)
    replaces: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class EnginePlan:
    """Everything that was decided. Equal inputs give an equal plan; it survives JSON unchanged.

    Attributes:
        api: interface version of the core. core: its package version.
        accelerator: backend name; device: its probe's answer, as plain data.
        plugins: loaded plugins, by name.
        choices: one per slot, in slot order, regions first; what they replace is left out.
        declined: regions whose parts serve instead: the provider is ``"parts"``, and the reason says why.
        policy: scheduling policy, ``plugin:name``; drafter: likewise, or None.
        features: names of switched-on features. facts: device and library facts, for display.
    """

    api: tuple[int, int]
    core: str
    accelerator: str
    device: Mapping[str, Any]
    plugins: tuple[PluginRecord, ...]
    choices: tuple[Choice, ...]
    policy: str
    declined: tuple[Choice, ...] = ()
    drafter: str | None = None
    features: tuple[str, ...] = ()
    facts: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Objection:
    """Answer of ``deepinfer_check_plan``: ``error`` stops before weights load, ``warning`` is logged."""

    severity: Literal["error", "warning"]
    text: str
