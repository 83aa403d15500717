"""A folder of distributions, each ill in a way of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ill_plugins import ILL, metadata, source


@pytest.fixture(scope="session")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, but for those that hang or end their process."""
    folder = tmp_path_factory.mktemp("ward")
    for name, ill in ILL.items():
        if not ill.fatal:
            install(folder, name)
    return folder


def install(folder: Path, name: str) -> None:
    (folder / f"{name}_plugin.py").write_text(source(name), encoding="utf-8")
    metadata(folder, name, ILL[name].requires)


@pytest.fixture
def alone(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """One of them: the test's parameter."""
    install(tmp_path, request.param)
    return tmp_path
