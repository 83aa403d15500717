"""Environments of their own that see this one's packages too, as a user's would."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import attrs

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
