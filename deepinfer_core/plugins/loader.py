"""Import plugins one by one under a guard, check them, and undo completely whatever fails."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from deepinfer_core.api import EnginePlan, PluginError, PluginRecord

from .discovery import PATH_DISTRIBUTION, Candidate, discover, installed_version
from .failure import Failure, Stage, cause_line, full_traceback
from .inspection import check_identity, check_implementations
from .nearest import suggest
from .registry import LoadedPlugin, Registry
from .selection import select


def load_plugins(
    allow: Sequence[str] | None = None,
    block: Sequence[str] = (),
    requested: Sequence[str] | Mapping[str, str] = (),
    strict: bool = False,
    path: Sequence[str] | None = None,
    files: Sequence[str] = (),
) -> Registry:
    """Find, import and check plugins. Keeps no global state: loading twice gives two equal registries.

    Args:
        allow: ``DEEPINFER_PLUGINS``: None allows all that are installed; a list allows these (``name`` or
            ``name@distribution``) and the core's own, so an empty list allows no strangers.
        block: ``--no-plugin``: names never loaded, the core's own included.
        requested: plugins that the configuration names elsewhere, perhaps with the setting that does.
        strict: raise at the first failure, whoever asked.
        path: where to look for package metadata, default ``sys.path``. Modules always come from ``sys.path``.
        files: ``plugins.paths``: a dotted module or a ``.py`` file each; always asked for.

    Returns:
        A registry of what works. A broken plugin nobody asked for is one log line and ``Registry.failures``.

    Raises:
        PluginError: an unknown name; a plugin asked for (in ``allow``, ``requested`` or ``files``) that is broken.
    """
    registry = Registry(strict=strict)
    for file in files:
        _load_path(registry, file)
    here = set(registry.plugins)
    origins = requested if isinstance(requested, Mapping) else dict.fromkeys(requested, "asked for")
    asked = {name: origin for name, origin in origins.items() if name not in here}
    selection = select(discover(path), allow, block, asked)
    for candidate in selection.chosen:
        if candidate.name in here:
            raise PluginError(
                f"plugins.paths has a plugin named {candidate.name!r}, and so has {candidate.distribution}; "
                f"block that with --no-plugin {candidate.name}"
            )
    for failure in selection.failures:
        registry.report(failure)
    for candidate in selection.chosen:
        _load(registry, candidate, asked=candidate.name in selection.asked)
    _settle(registry)
    return registry


def load_planned(plan: EnginePlan) -> Registry:
    """Load exactly the plugins of a plan, in a worker process: no discovery, every failure an error.

    Raises:
        PluginError: a plugin is missing, broken, or of another version than the plan's.
    """
    registry = Registry()
    for record in plan.plugins:
        if record.distribution == PATH_DISTRIBUTION:
            _load_path(registry, record.entry_point)
            found = registry.plugins[record.name].record.version if record.name in registry.plugins else None
            _check_version(record, found)
            continue
        _check_version(record, installed_version(record.distribution))
        candidate = Candidate(
            name=record.name,
            distribution=record.distribution,
            version=record.version,
            entry_point=record.entry_point,
            path=record.entry_point,
        )
        _load(registry, candidate, asked=True)
    _settle(registry)
    return registry


def _check_version(record: PluginRecord, found: str | None) -> None:
    if found != record.version:
        raise PluginError(
            f"plugin {record.name!r}: the plan was made with {record.distribution} {record.version}, "
            f"this process has {found or 'none'}; install the same version everywhere"
        )


def _load(registry: Registry, candidate: Candidate, *, asked: bool) -> None:
    """Import, register and identify one plugin; on any failure leave no trace and report it."""
    stage: Stage = "import"
    try:
        plugin = import_entry_point(candidate.entry_point)
        stage = "register"
        _admit(registry, plugin, candidate, asked=asked)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit included: a plugin must not end the program
        failure = Failure(
            name=candidate.name,
            distribution=candidate.distribution,
            version=candidate.version,
            path=candidate.path,
            stage=stage,
            cause=cause_line(error),
            traceback=full_traceback(error),
        )
        registry.report(failure, error, asked=asked)


def _admit(registry: Registry, plugin: Any, candidate: Candidate, *, asked: bool) -> None:
    check_implementations(registry.manager, plugin)
    name = candidate.name
    if registry.manager.has_plugin(name):
        raise PluginError(f"another plugin named {name!r} is already loaded")
    try:
        registry.manager.register(plugin, name=name)
        registry.manager.check_pending()
        info = check_identity(_identify(registry, plugin), name)
        record = PluginRecord(
            name=name,
            distribution=candidate.distribution,
            version=candidate.version,
            entry_point=candidate.entry_point,
        )
        registry.register(plugin, LoadedPlugin(info=info, record=record, path=candidate.path, asked=asked))
    except BaseException:
        registry.unregister(name)
        raise


def _identify(registry: Registry, plugin: Any) -> object:
    own = [impl for impl in registry.manager.hook.deepinfer_plugin.get_hookimpls() if impl.plugin is plugin]
    if len(own) != 1:
        raise PluginError(f"implements deepinfer_plugin {len(own)} times; it is required once")
    return own[0].function()


def import_entry_point(entry_point: str) -> Any:
    """What ``package.module`` or ``package.module:attribute`` names."""
    module, _, attribute = entry_point.partition(":")
    found: Any = importlib.import_module(module.strip())
    for part in filter(None, attribute.strip().split(".")):
        found = getattr(found, part)
    return found


def _load_path(registry: Registry, text: str) -> None:
    """Load a plugin that is not installed: a dotted module, or a ``.py`` file, which may be imported by its stem."""
    try:
        module = import_path(text)
        own = getattr(module, "deepinfer_plugin", None)
        name = getattr(own() if callable(own) else None, "name", None)
        if not isinstance(name, str):
            raise PluginError("has no deepinfer_plugin() that returns a PluginInfo")
        candidate = Candidate(
            name=name,
            distribution=PATH_DISTRIBUTION,
            version=_fingerprint(module),
            entry_point=text,
            path=str(module.__file__),
        )
        _admit(registry, module, candidate, asked=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        in_package = isinstance(error, ImportError) and "relative import" in str(error)
        fix = "; it belongs to a package: name it with dots, as package.plugin" if in_package else ""
        raise PluginError(f"plugins.paths: {text!r}: {cause_line(error)}{fix}") from error


def import_path(text: str) -> ModuleType:
    """The module that an item of ``plugins.paths`` names."""
    return _import_file(Path(text)) if text.endswith(".py") else importlib.import_module(text)


def _import_file(file: Path) -> ModuleType:
    name, origin = file.stem, str(file.resolve())
    loaded = sys.modules.get(name)
    if loaded is not None and os.path.realpath(getattr(loaded, "__file__", None) or "") == origin:
        return loaded
    if loaded is not None or _found_elsewhere(name, origin):
        raise PluginError(f"module name {name!r} is already taken; rename the file")
    spec = importlib.util.spec_from_file_location(name, origin)
    if spec is None or spec.loader is None or not file.is_file():
        raise PluginError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that LazyRef("stem:attribute") finds it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _found_elsewhere(name: str, origin: str) -> bool:
    """Whether ``import name`` would give another module; the file's own folder may be where modules are looked for."""
    found = importlib.util.find_spec(name)
    return found is not None and os.path.realpath(found.origin or "") != origin


def _fingerprint(module: ModuleType) -> str:
    """A version for code that has none: workers compare it with the plan's."""
    return "sha256:" + hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]


def _settle(registry: Registry) -> None:
    """Drop plugins whose ``needs`` are not loaded or whose ``conflicts`` are, until none is left."""
    while True:
        dropped = _conflicts(registry.plugins) or _unmet_needs(registry)
        if not dropped:
            return
        for name, (stage, cause) in sorted(dropped.items()):
            plugin = registry.plugins[name]
            registry.unregister(name)
            failure = Failure(
                name=name,
                distribution=plugin.record.distribution,
                version=plugin.record.version,
                path=plugin.path,
                stage=stage,
                cause=cause,
            )
            registry.report(failure, asked=plugin.asked)


def _conflicts(plugins: Mapping[str, LoadedPlugin]) -> dict[str, tuple[Stage, str]]:
    """The one that declares a conflict gives way, unless only it was asked for."""
    dropped: dict[str, tuple[Stage, str]] = {}
    for plugin in plugins.values():
        for other in (plugins[name] for name in plugin.info.conflicts if name in plugins):
            loser = other if plugin.asked and not other.asked else plugin
            dropped[loser.name] = (
                "conflict",
                f"{plugin.name!r} does not work together with {other.name!r}; block one with --no-plugin",
            )
    return dropped


def _unmet_needs(registry: Registry) -> dict[str, tuple[Stage, str]]:
    dropped: dict[str, tuple[Stage, str]] = {}
    for plugin in registry.plugins.values():
        missing = [name for name in plugin.info.needs if name not in registry.plugins]
        if missing:
            why = [failure.cause for failure in registry.failures if failure.name == missing[0]]
            more = f" ({why[0]})" if why else suggest(missing[0], registry.plugins)
            dropped[plugin.name] = ("needs", f"needs plugin {missing[0]!r}, which is not loaded{more}")
    return dropped
