"""Which plugins are installed: read from package metadata alone; no plugin code runs.

The standard library's ``entry_points()`` shows one metadata folder per distribution, the first on the
path, so a stale one hides a good install. Here every folder is read and the best one is kept.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import attrs
from packaging.utils import canonicalize_name

from deepinfer_core import __version__
from deepinfer_core.api import ENTRY_POINT_GROUP

from .failure import Failure, Stage

CORE_DISTRIBUTION = "deepinfer-core"
SOURCE_TREE = f"{CORE_DISTRIBUTION} (source tree)"
PATH_DISTRIBUTION = "(plugins.paths)"
"""In place of a distribution, for a plugin that is not installed but named by ``plugins.paths``."""

BUILTINS = {
    "reference": "deepinfer_core.reference.plugin",
    "cpu": "deepinfer_core.cpu.plugin",
    "models": "deepinfer_core.models.plugin",
    "engine": "deepinfer_core.engine.plugin",
}
"""The core's own plugins, for a source tree that was never installed; otherwise its metadata says the same."""

_ANY_MAJOR = re.compile(r"deepinfer\.plugins\.v\d+")
_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@attrs.frozen(kw_only=True)
class Candidate:
    """One installed plugin.

    Attributes:
        name: entry-point name. distribution, version: as in its metadata.
        entry_point: ``package.module`` or ``package.module:attribute``.
        path: metadata folder. editable: installed in place.
        duplicates: further metadata folders of the same distribution, which were ignored.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    path: str
    editable: bool = False
    duplicates: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        return f"{self.name}@{canonicalize_name(self.distribution)}"

    @property
    def by_path(self) -> bool:
        return self.distribution == PATH_DISTRIBUTION

    @property
    def builtin(self) -> bool:
        return self.distribution == SOURCE_TREE or canonicalize_name(self.distribution) == CORE_DISTRIBUTION


@attrs.frozen
class Discovery:
    """Candidates and failures, both sorted by name and distribution."""

    candidates: tuple[Candidate, ...]
    failures: tuple[Failure, ...]


@attrs.frozen(kw_only=True)
class _Folder:
    """A metadata folder that names plugins, of this interface's major or of another."""

    dist: metadata.Distribution
    name: str
    path: str
    order: int
    entries: tuple[metadata.EntryPoint, ...]
    missing: Mapping[str, str]
    """Module of an entry -> the part of it that is not installed."""

    def rank(self) -> tuple[bool, bool, bool, int]:
        """Smaller is better: importable, naming our group, written by an installer, early on the path."""
        ours = any(entry.group == ENTRY_POINT_GROUP for entry in self.entries)
        return (bool(self.missing), not ours, not self.path.endswith(".dist-info"), self.order)


def discover(path: Sequence[str] | None = None) -> Discovery:
    """Read the metadata of every distribution on ``path`` (default ``sys.path``); imports nothing."""
    dists = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    candidates: list[Candidate] = []
    failures: list[Failure] = []
    for folders in _by_distribution(_folders(dists, path)):
        best, *others = sorted(folders, key=_Folder.rank)
        found, failed = _read(best, tuple(folder.path for folder in others))
        candidates += found
        failures += failed
    if not any(candidate.builtin for candidate in candidates):
        candidates += _source_tree()
    return Discovery(
        tuple(sorted(candidates, key=lambda c: (c.name, c.distribution, c.entry_point))),
        tuple(sorted(failures, key=lambda f: (f.name, f.distribution))),
    )


def installed_version(distribution: str) -> str | None:
    """Version of a distribution's best metadata folder, or None: stale folders count no more here than above."""
    if distribution == SOURCE_TREE:
        return __version__
    folders = sorted(_folders(metadata.distributions(name=distribution), None), key=_Folder.rank)
    return folders[0].dist.version if folders else None


def _folders(dists: Iterable[metadata.Distribution], path: Sequence[str] | None) -> Iterable[_Folder]:
    seen: set[str] = set()
    for order, dist in enumerate(dists):
        if "deepinfer.plugins." not in (dist.read_text("entry_points.txt") or ""):
            continue  # cheap: most folders are not parsed
        # PathDistribution keeps its folder private; other finders have only a root.
        folder = os.path.realpath(str(getattr(dist, "_path", dist.locate_file(""))))
        (name, *_) = dist.metadata.get_all("Name") or [""]
        if folder in seen or not name:  # lib64 linked to lib; a half-removed install
            continue
        seen.add(folder)
        entries = tuple(entry for entry in dist.entry_points if _ANY_MAJOR.fullmatch(entry.group))
        missing = {entry.module: gone for entry in entries if (gone := _missing_package(entry.module, path))}
        yield _Folder(dist=dist, name=name, path=folder, order=order, entries=entries, missing=missing)


def _by_distribution(folders: Iterable[_Folder]) -> Iterable[list[_Folder]]:
    groups: dict[str, list[_Folder]] = {}
    for folder in folders:
        groups.setdefault(canonicalize_name(folder.name), []).append(folder)
    return groups.values()


def _missing_package(module: str, path: Sequence[str] | None) -> str | None:
    """The part of ``module`` that is not installed, or None. Looks no deeper than it can without importing.

    An uninstalled package often leaves an empty folder behind, which Python takes for a namespace package;
    so namespaces are followed one level further.
    """
    name, *rest = module.split(".")
    spec = _top_spec(name, path)
    while spec is not None and spec.origin is None and spec.submodule_search_locations is not None and rest:
        name = f"{name}.{rest.pop(0)}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return name if spec is None else None


def _top_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    return found or (None if path is None else importlib.machinery.PathFinder.find_spec(name, list(path)))


def _read(folder: _Folder, duplicates: tuple[str, ...]) -> tuple[list[Candidate], list[Failure]]:
    editable = _is_editable(folder.dist)
    candidates: dict[str, Candidate] = {}
    failures: list[Failure] = []

    def failed(name: str, stage: Stage, cause: str) -> None:
        failures.append(
            Failure(
                name=name,
                distribution=folder.name,
                version=folder.dist.version,
                path=folder.path,
                stage=stage,
                cause=cause,
            )
        )

    # Our own group first: an author who ships v1 and v2 side by side is not incompatible.
    for entry in sorted(folder.entries, key=lambda e: (e.group != ENTRY_POINT_GROUP, e.group, e.name)):
        known = candidates.get(entry.name)
        if entry.group != ENTRY_POINT_GROUP:
            if known is None:
                major = entry.group.rpartition(".")[2]
                failed(entry.name, "version", f"made for plugin interface {major}; this core has {ENTRY_POINT_GROUP}")
        elif not _VALID_NAME.fullmatch(entry.name):
            failed(entry.name, "identity", f"name {entry.name!r}: use letters, digits, '-' and '_'")
        elif entry.module in folder.missing:
            gone = folder.missing[entry.module]
            failed(entry.name, "stale", f"package {gone!r} is not installed; remove or reinstall {folder.name}")
        elif known is not None and known.entry_point != entry.value:
            failed(entry.name, "duplicate", f"declared twice: as {known.entry_point} and as {entry.value}")
            del candidates[entry.name]
        else:
            candidates[entry.name] = Candidate(
                name=entry.name,
                distribution=folder.name,
                version=folder.dist.version,
                entry_point=entry.value,
                path=folder.path,
                editable=editable,
                duplicates=duplicates,
            )
    return list(candidates.values()), failures


def _is_editable(dist: metadata.Distribution) -> bool:
    try:
        url = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return bool(isinstance(url, dict) and url.get("dir_info", {}).get("editable"))


def _source_tree() -> list[Candidate]:
    root = str(Path(__file__).resolve().parent.parent)
    return [
        Candidate(name=name, distribution=SOURCE_TREE, version=__version__, entry_point=value, path=root)
        for name, value in BUILTINS.items()
    ]
