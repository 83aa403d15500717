"""What the tests of documents and examples share: places, an installer."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DISTRIBUTIONS = ("acme_backend", "shortest_policy")
Script = Callable[..., str]
"""``python("-c", source, ...)`` -> what it wrote."""


def install(source: Path, site: Path) -> None:
    """Copy a distribution's package and write its metadata, as an installer does from ``pyproject.toml``."""
    about = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    project = about["project"]
    for package in about["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(source / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(head, encoding="utf-8")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
