"""The program run in this process, in a clean environment, with a stand-in for the engine where one is needed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from cli_checkpoint import write_checkpoint
from cli_fakes import FakeLLM, Result, Run

import deepinfer_core
from deepinfer_core.cli import main


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DEEPINFER_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    """The program configures logging once, for a standard error that ends with the test."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    FakeLLM.instances = []
    monkeypatch.setattr(deepinfer_core, "LLM", FakeLLM, raising=False)
    return FakeLLM


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``deepinfer ARGUMENTS`` with ``stdin`` as its standard input."""

    def call(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Runs the program, and requires one clear line on standard error, exit code 2 and no output."""

    def call(*arguments: str, stdin: str = "") -> str:
        result = run(*arguments, stdin=stdin)
        assert result.code == 2
        assert result.out == ""
        assert result.err.count("\n") == 1
        assert result.err.startswith("error: ")
        return result.err.removeprefix("error: ").strip()

    return call
