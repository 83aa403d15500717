"""Generated projects, and environments that they are installed in as a user would install them."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
from toys.distributions import pip_install

from deepinfer_core.scaffold import KINDS, new_backend, new_plugin

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Environment:
    """A Python of its own that sees this one's packages too."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    def run(self, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
        """``python ARGUMENTS`` without our variables; what it wrote to standard output."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER_", "PYTHON"))}
        done = subprocess.run(
            [self.python, *arguments],
            env={**clean, "OMP_NUM_THREADS": "1"},
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def deepinfer(self, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
        return self.run("-m", "deepinfer_core.cli", *arguments, cwd=cwd, code=code)


def make_environment(folder: Path) -> Environment:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in [*site.getsitepackages(), *sys.path] if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(seen)]
    (packages / "base.pth").write_text("\n".join([str(ROOT), *lines]) + "\n", encoding="utf-8")
    return Environment(folder)


Project = Callable[[str], Path]


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
