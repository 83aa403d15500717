"""Whether the loop runs one step ahead, and why not."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from deepinfer_core.api import Device, ModelSpec, Provider
from deepinfer_core.config import EngineConfig

log = structlog.stdlib.get_logger(__name__)

AHEAD = "one step ahead"


def drafts(config: EngineConfig) -> bool:
    """True when a drafter is in use."""
    return config.speculation.method is not None and config.speculation.max_draft_tokens > 0


def warn_unused(config: EngineConfig) -> None:
    """Whoever sets how drafts are made expects some; ``DEEPINFER_USE_NEXTN_DECODE`` alone made them once."""
    given = [
        f"{path} ({source})"
        for path, source in config.sources.items()
        if path.startswith("speculation.") and path != "speculation.method" and source != "default"
    ]
    if config.speculation.method is None and given:
        log.warning("settings of drafts change nothing: set speculation.method, too", settings=", ".join(given))


def sampling_demands(config: EngineConfig, *, host_drafts: bool) -> frozenset[str]:
    """Caps that sampling stages must have: a drafter samples several rows of one request, and a loop that was
    told to run ahead samples before the host knows the last tokens."""
    demands = set()
    if drafts(config):
        demands.add("spec_verify")
    if config.scheduling.async_scheduling is True and not host_drafts:
        demands.add("device_state")
    return frozenset(demands)


def loop_mode(
    config: EngineConfig, spec: ModelSpec, device: Device, sampling: Iterable[Provider], *, host_drafts: bool
) -> str:
    """:data:`AHEAD`, or ``"synchronous: <why>"``, as ``explain`` shows it."""
    wanted = config.scheduling.async_scheduling
    if wanted is False:
        return "synchronous: scheduling.async_scheduling is false"
    if spec.host_token_ids:
        return "synchronous: the model needs token ids on the host"
    if host_drafts:
        return "synchronous: the drafter needs the last tokens on the host"
    if wanted == "auto":
        if not device.overlaps:
            return "synchronous: this device shares its cores with the host"
        host_bound = sorted({p.name for p in sampling if "device_state" not in p.caps})
        if host_bound:
            return f"synchronous: sampling reads host state ({', '.join(host_bound)})"
    return AHEAD
