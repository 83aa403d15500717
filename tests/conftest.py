"""Fixtures for every test: the toys, one thread, no leftover environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes side by side have a thread each, their engines and children too: more would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import structlog
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Read when Triton is imported, which torch may do at any time: kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from toys import seeds
from toys.checkpoints import ToyLLM, open_toy, write_toy

from deepinfer_core import LLM

# Time decides nothing here: machines are loaded, and the first example of a test may build a model.
settings.register_profile("deepinfer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deepinfer")

CHECKPOINT_KEYS = ("tokenizer", "groups", "max_len", "vocab_size", "logits", "script", "count_mod", "eos_token_id")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    seeds.take(config)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines measure and keep is neither taken from the user's cache nor left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    """An engine configures logging for the process; the next test starts without."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def toy_llm(tmp_path: Path) -> Iterator[ToyLLM]:
    """``toy_llm(kind, **options)``: an engine over a toy, closed after the test.

    Options named in ``CHECKPOINT_KEYS`` describe the checkpoint; others are settings, ``group__field=value``.
    """
    opened: list[LLM] = []

    def make(kind: str, **options: Any) -> LLM:
        checkpoint = {key: options.pop(key) for key in CHECKPOINT_KEYS if key in options}
        directory = write_toy(tmp_path / f"toy{len(opened)}", kind, **checkpoint)
        opened.append(open_toy(directory, **options))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()
