"""Hygiene: what a plugin owes before a single operator runs. Needs no hardware and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deepinfer_core import api
from deepinfer_core.api import API_VERSION
from deepinfer_core.plugins import LoadedPlugin

from .api_minors import added_in
from .case import Case, Mismatch
from .sources import foreign_assignments, hooks, imports, plugin_sources

if TYPE_CHECKING:
    from .target import Target

_ALLOWED = ("deepinfer_core.api", "deepinfer_core.conformance")


def _import_loads_no_torch(target: Target) -> str:
    heavy = facts(target)["heavy"]
    if heavy:
        raise Mismatch(f"importing the plugin and asking its hooks imported {', '.join(heavy)}; import it in operators")
    return "in a fresh process"


def _import_opens_no_device(target: Target) -> str:
    opened = facts(target)["opened"]
    if opened:
        raise Mismatch(f"importing the plugin and asking its hooks opened {', '.join(opened)}; a probe only looks")
    return "in a fresh process"


def _loads_twice(target: Target) -> str:
    found = facts(target)
    if found["failures"]:
        raise Mismatch(f"found {'; '.join(found['failures'])}")
    for what in ("records", "declared"):
        again = found["again" if what == "records" else "declared_again"]
        if found[what] != again:
            changed = [item for item in again if item not in found[what]] or found[what]
            raise Mismatch(f"loaded a second time, the plugins answer otherwise: {changed[0]}")
    return "in a fresh process"


def _loads_under_spawn(target: Target) -> str:
    spawned = facts(target)["spawned"]
    if spawned:
        raise Mismatch(f"a spawned worker could not load the plan's plugins: {spawned}")
    return "in a spawned process"


def _plan_round_trip(target: Target) -> str:
    if not facts(target)["same_plan"]:
        raise Mismatch("a plan for this device changes when it is written to JSON and read back")
    return "as JSON"


def _imports_interface_only(target: Target) -> str:
    plugin, count = _plugin(target), 0
    strangers = _strangers(target)
    for source in plugin_sources(plugin.record.entry_point):
        count += 1
        for line, name in imports(source):
            own = source.package and f"{name}.".startswith(f"{source.package}.")
            core = name.split(".")[0] == "deepinfer_core" and not f"{name}.".startswith(
                tuple(f"{a}." for a in _ALLOWED)
            )
            if core and not own:
                raise Mismatch(f"{source.file}:{line} imports {name}; of the core, only deepinfer_core.api is promised")
            if not own and name.split(".")[0] in strangers:
                raise Mismatch(f"{source.file}:{line} imports {name}, another plugin's package")
    return f"{count} files"


def _patches_nothing(target: Target) -> str:
    count = 0
    for source in plugin_sources(_plugin(target).record.entry_point):
        count += 1
        for line, code in foreign_assignments(source):
            raise Mismatch(
                f"{source.file}:{line} assigns to what it imported: {code!r}; report the missing hook instead"
            )
    return f"{count} files"


def _api_range(target: Target) -> str:
    plugin = _plugin(target)
    declared = tuple(plugin.info.api)
    text = ".".join(map(str, declared))
    if declared[0] != API_VERSION[0] or declared[1] > API_VERSION[1]:
        raise Mismatch(f"PluginInfo.api is {text}, this core has {'.'.join(map(str, API_VERSION))}")
    for source in plugin_sources(plugin.record.entry_point):
        for line, name in imports(source):
            if not name.startswith("deepinfer_core.api."):
                continue
            first = name.split(".")[2]
            if first != "*" and first not in api.__all__ and not hasattr(api, first):
                raise Mismatch(f"{source.file}:{line} imports {name}, which the interface does not have")
            _check_since(f"{source.file}:{line} imports {first}", first, declared)
        for line, hook in hooks(source):
            _check_since(f"{source.file}:{line} implements {hook} without optionalhook", hook, declared)
    return f"interface {text}"


def _check_since(what: str, name: str, declared: tuple[int, ...]) -> None:
    since = added_in(name)
    if since > declared:
        came, said = (".".join(map(str, version)) for version in (since, declared))
        raise Mismatch(f"{what}, which came with interface {came}; PluginInfo.api says {said} is enough")


_CASES: tuple[tuple[str, Callable[[Target], str]], ...] = (
    ("import_loads_no_torch", _import_loads_no_torch),
    ("import_opens_no_device", _import_opens_no_device),
    ("loads_twice", _loads_twice),
    ("loads_under_spawn", _loads_under_spawn),
    ("plan_round_trip", _plan_round_trip),
    ("imports_interface_only", _imports_interface_only),
    ("patches_nothing", _patches_nothing),
    ("api_range", _api_range),
)


def cases(dtype: str) -> Iterator[Case]:
    """Every hygiene case."""
    for name, check in _CASES:
        yield Case(id=f"hygiene/{name}", family="hygiene", tier="boots", check=check, required=True)


def facts(target: Target) -> dict[str, Any]:
    """What a fresh process found out about the target's plugin; asked once."""
    if "hygiene" not in target.facts:
        plugin = _plugin(target)
        question = {"plugin": plugin.name, "backend": target.device.info.backend, "files": list(target.plugin_files)}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        answer = subprocess.run(
            [sys.executable, "-m", "deepinfer_core.conformance.child"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        if answer.returncode != 0:
            last = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            raise Mismatch(f"a fresh process could not load the plugin: {last[-1]}")
        target.facts["hygiene"] = json.loads(answer.stdout)
    found: dict[str, Any] = target.facts["hygiene"]
    return found


def _plugin(target: Target) -> LoadedPlugin:
    if target.registry is None:
        raise Mismatch("the target was made without a registry")
    return target.registry.plugins[target.plugin]


def _strangers(target: Target) -> set[str]:
    """Top packages of other plugins of other distributions."""
    mine = _plugin(target)
    assert target.registry is not None
    return {
        plugin.record.entry_point.split(".")[0]
        for plugin in target.registry.plugins.values()
        if plugin.record.distribution != mine.record.distribution and not plugin.record.entry_point.endswith(".py")
    } - {"deepinfer_core", mine.record.entry_point.split(".")[0]}
