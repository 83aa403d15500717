"""Which device to run on: the user's word, or the highest priority of what the probes saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from deepinfer_core.api import Device, DeviceError, DeviceInfo, Loser, NoDevice, PlanError, PluginError, ProbeEnv

from .making import guarded
from .nearest import suggest
from .registry import Registry

Answer = TypeVar("Answer", DeviceInfo, NoDevice)

VARIABLE = "DEEPINFER_ACCELERATOR"
AUTO = "auto"
_DEVICE_METHODS = ("default_dtype", "stream", "memory", "upload", "download", "is_out_of_memory", "describe")


class DeviceChoice(NamedTuple):
    """The chosen device, the plugin that declared it, and every other candidate with its reason."""

    device: DeviceInfo
    plugin: str
    losers: tuple[Loser, ...]

    def open(self) -> Device:
        """The device itself. PluginError if its code cannot be imported, raises, or makes something else."""
        target = self.device.provider
        what = f"accelerator {self.device.backend!r}"
        opened: Device = guarded(what, self.plugin, target, lambda: target.load()(self.device), _DEVICE_METHODS)
        return opened


def choose_device(
    registry: Registry, accelerator: str | None, environ: Mapping[str, str], *, root: str = "/"
) -> DeviceChoice:
    """Probe and choose.

    Args:
        accelerator: a backend's name, ``plugin:backend`` where two plugins share it, or None or ``"auto"``.
        environ: the environment; ``DEEPINFER_ACCELERATOR`` is used when ``accelerator`` says nothing, and may
            also be a name of the original engine that an installed backend declares.
        root: file-system root the probes look at.

    Raises:
        DeviceError: no device at all, or not the one asked for. Never answered with another device.
        PluginError: the backend asked for is that of a broken plugin.
        PlanError: two backends are equally good; the text holds the line that decides.
    """
    answers = registry.collect("deepinfer_probe", env=ProbeEnv(environ=dict(environ), root=root))
    found = [(plugin, answer) for plugin, answer in answers if isinstance(answer, DeviceInfo)]
    absent = [(plugin, answer) for plugin, answer in answers if isinstance(answer, NoDevice)]
    wanted = accelerator if accelerator not in (None, "", AUTO) else None
    origin = "accelerator"
    if wanted is None and environ.get(VARIABLE, AUTO) not in ("", AUTO):
        wanted, origin = environ[VARIABLE], VARIABLE
    matching = found if wanted is None else _named(found, wanted, legacy=origin == VARIABLE)
    if not matching:
        raise _no_device(registry, found, absent, wanted, origin)
    plugin, device = _best(matching)
    return DeviceChoice(device, plugin, _losers(registry, found, absent, plugin, device, wanted))


def _named(found: list[tuple[str, Answer]], wanted: str, *, legacy: bool) -> list[tuple[str, Answer]]:
    exact = [(plugin, info) for plugin, info in found if wanted in (info.backend, f"{plugin}:{info.backend}")]
    if exact or not legacy:
        return exact
    return [(plugin, info) for plugin, info in found if wanted in info.legacy_names]


def _best(matching: list[tuple[str, DeviceInfo]]) -> tuple[str, DeviceInfo]:
    top = max(info.priority for _, info in matching)
    best = [(plugin, info) for plugin, info in matching if info.priority == top]
    rivals = sorted({(plugin, info.backend) for plugin, info in best})
    if len(rivals) > 1:
        backends = [backend for _, backend in rivals]
        names = [b if backends.count(b) == 1 else f"{p}:{b}" for p, b in rivals]
        lines = " or ".join(f"accelerator = {json.dumps(name)}" for name in names)
        raise PlanError(
            f"backends {' and '.join(names)} have the same priority ({top}); write the one you want: {lines}"
        )
    return best[0]  # one backend's devices of equal priority: its own order decides


def _losers(
    registry: Registry,
    found: list[tuple[str, DeviceInfo]],
    absent: list[tuple[str, NoDevice]],
    plugin: str,
    device: DeviceInfo,
    wanted: str | None,
) -> tuple[Loser, ...]:
    losers = []
    for other, info in found:
        if (other, info) == (plugin, device):
            continue
        reason = (
            f"priority {info.priority}, chosen has {device.priority}" if wanted is None else f"{wanted!r} was asked for"
        )
        losers.append(
            Loser(provider=f"{other}:{info.backend}", reason=f"{reason}; {info.evidence}", score=info.priority)
        )
    losers += [Loser(provider=f"{other}:{none.backend}", reason=f"{none.reason}; {none.fix}") for other, none in absent]
    silent = set(registry.implementers("deepinfer_probe")) - {name for name, _ in found} - {name for name, _ in absent}
    failed = {f.name: f.cause for f in registry.failures}
    losers += [Loser(provider=name, reason=failed.get(name, "found no device")) for name in sorted(silent)]
    losers += [Loser(provider=name, reason=failed[name]) for name in sorted(set(failed) - set(registry.plugins))]
    return tuple(losers)


def _no_device(
    registry: Registry,
    found: list[tuple[str, DeviceInfo]],
    absent: list[tuple[str, NoDevice]],
    wanted: str | None,
    origin: str,
) -> DeviceError | PluginError:
    broken = [str(f) for f in registry.failures if wanted is None or f.name == wanted.partition(":")[0]]
    if wanted is not None and not broken and (asked := _named(absent, wanted, legacy=origin == VARIABLE)):
        return DeviceError(f"{origin}={wanted!r}: " + "; ".join(f"{none.reason}; {none.fix}" for _, none in asked))
    silent = sorted(set(registry.implementers("deepinfer_probe")) - {name for name, _ in found})
    rest = f"; found no device: {', '.join(silent)}" if silent else ""
    if wanted is None:
        fix = "" if "cpu" in registry.plugins else "; load the plugin cpu, which plugins.block (--no-plugin) keeps out"
        return DeviceError(f"no plugin found a device{rest}" + "".join(f"; {text}" for text in broken) + fix)
    if broken:
        return PluginError(f"{origin}={wanted!r}: {'; '.join(broken)}")
    rest += "".join(f"; {failure}" for failure in registry.failures)
    names = [info.backend for _, info in found] + [none.backend for _, none in absent]
    return DeviceError(f"{origin}={wanted!r}: no such device{suggest(wanted, names)}{rest}")
