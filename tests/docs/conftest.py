"""A tiny model, and the example distributions as an installer leaves them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_support import DISTRIBUTIONS, EXAMPLES, ROOT, Script, install
from toys.tiny_llama import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that both example distributions are installed in."""
    folder = tmp_path_factory.mktemp("site")
    for name in DISTRIBUTIONS:
        install(EXAMPLES / name, folder)
    return folder


@pytest.fixture
def python(site: Path, tmp_path: Path) -> Script:
    """Runs Python in a process of its own, with the examples installed; returns what it wrote."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    environ = {**inherited, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
