"""Distributions as an installer leaves them: built by their own build backend, without an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")


def pip_install(*arguments: str, python: str = sys.executable) -> None:
    """``pip install`` into the environment of ``python``, or where the arguments say."""
    at = () if python == sys.executable else ("--python", python)
    command = [sys.executable, *PIP, *at, "install", *OFFLINE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def install_into(folder: Path, source: Path) -> None:
    """Build ``source`` as a wheel and unpack it in ``folder``, with its metadata."""
    pip_install("--target", str(folder), str(source))
