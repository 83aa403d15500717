"""Whether the loop runs one step ahead, and why not."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer_core.api import Device, ModelSpec, Provider
from deepinfer_core.config import EngineConfig

AHEAD = "one step ahead"


def drafts(config: EngineConfig) -> bool:
    """True when a drafter is in use."""
    return config.speculation.method is not None and config.speculation.max_draft_tokens > 0


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
