"""Names of new projects: usable everywhere a plugin's name goes, and nobody's yet."""

from __future__ import annotations

import importlib.util
import re
from keyword import iskeyword
from pathlib import Path

import attrs

from deepinfer_core.api import ENTRY_POINT_GROUP, ConfigError
from deepinfer_core.plugins import discover

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED = {"auto", "none", "core", "test", "tests", "api", "demo"}


@attrs.frozen
class ProjectName:
    """A checked name and what is made of it: ``my_chip``: ``deepinfer-my-chip``, ``deepinfer_my_chip``, ``MyChip``."""

    name: str

    @property
    def distribution(self) -> str:
        return f"deepinfer-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        return f"deepinfer_{self.name}"

    @property
    def camel(self) -> str:
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def title(self) -> str:
        return self.name.replace("_", " ").capitalize()

    def values(self) -> dict[str, str]:
        """What templates may use."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "package": self.package,
            "camel": self.camel,
            "title": self.title,
            "group": ENTRY_POINT_GROUP,
        }


def check_name(name: str) -> ProjectName:
    """A name for a plugin that nobody has.

    Raises:
        ConfigError: it is no identifier in lower case, it is reserved, or a plugin or package has it.
    """
    if not _NAME.fullmatch(name) or iskeyword(name) or name.endswith("_") or "__" in name:
        raise ConfigError(f"name {name!r}: use a lower-case identifier such as 'acme' or 'my_chip'")
    if name in _RESERVED:
        raise ConfigError(f"name {name!r}: has a meaning of its own; choose another")
    found = discover()
    homes = [c.distribution for c in found.candidates if c.name == name]
    homes += [failure.distribution for failure in found.failures if failure.name == name]
    if homes:
        raise ConfigError(f"name {name!r}: taken by a plugin of {homes[0]}; choose another")
    project = ProjectName(name)
    if importlib.util.find_spec(project.package) is not None:
        raise ConfigError(f"name {name!r}: a package {project.package} is installed already; choose another")
    return project


def check_directory(project: ProjectName, directory: str | Path | None) -> Path:
    """Where the project goes: ``directory``, or a new one of the distribution's name here.

    Raises:
        ConfigError: something is there already, or the folder it should be made in is not.
    """
    target = Path(directory or project.distribution)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"directory {target}: exists already; name another with --directory")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"directory {target}: there is no folder {target.absolute().parent}")
    return target
