"""What the plugin declares."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from deepinfer_core.api import LazyRef, PluginInfo, PolicyInfo, hookimpl


@attrs.frozen
class ShortestSettings:
    """Set with ``plugins.shortest.patience`` or ``DEEPINFER_SHORTEST__PATIENCE``.

    ``patience``: seconds after which a waiting request goes before shorter ones.
    """

    patience: float = attrs.field(default=10.0, validator=attrs.validators.ge(0))


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="shortest", help="Shortest prompt first", settings=ShortestSettings)


@hookimpl
def deepinfer_scheduling() -> Sequence[PolicyInfo]:
    return [
        PolicyInfo(
            name="shortest",
            help="Shortest prompt first; after plugins.shortest.patience seconds, by age",
            factory=LazyRef("deepinfer_shortest.policy:Shortest"),
        )
    ]
