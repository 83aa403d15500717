"""The fake backend, installed in a folder of its own that only these tests see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys.distributions import install_into

SOURCE = Path(__file__).parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fake-site")
    install_into(folder, SOURCE)
    return folder


@pytest.fixture(autouse=True)
def _installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))


@pytest.fixture
def pool() -> Any:
    from deepinfer_fake.memory import POOL

    return POOL
