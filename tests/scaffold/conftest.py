"""Generated projects, and environments that they are installed in as a user would install them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from toys.distributions import pip_install
from toys.environments import Environment, make_environment

from deepinfer_core.scaffold import KINDS, new_backend, new_plugin


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One project of everything that can be generated, by what it is."""
    folder = tmp_path_factory.mktemp("projects")
    made = {"backend": folder / "zork"}
    new_backend("zork", directory=made["backend"])
    for kind in KINDS:
        made[kind] = folder / f"my_{kind}"
        new_plugin(f"my_{kind}", kind, directory=made[kind])
    return made


def install(projects: Sequence[Path], folder: Path, *, editable: bool) -> Environment:
    environment = make_environment(folder)
    words = [word for project in projects for word in (("-e", str(project)) if editable else (str(project),))]
    pip_install(*words, python=environment.python)
    return environment


@pytest.fixture(scope="session")
def wheels(projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Everything, built and installed as wheels."""
    return install(list(projects.values()), tmp_path_factory.mktemp("wheels"), editable=False)


@pytest.fixture(scope="session")
def editable(projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Everything, installed in place."""
    return install(list(projects.values()), tmp_path_factory.mktemp("editable"), editable=True)
