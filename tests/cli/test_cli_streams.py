"""Standard streams that are closed, full or of another encoding: one line, and no text lost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeLLM

from deepinfer_core.cli import main

MODEL = ("generate", "--model", "m")
ECHO = """
import sys
from deepinfer_core.cli import main
from deepinfer_core.cli.output import print_json
import click
from deepinfer_core.cli.guard import run
@click.command()
def command():
    click.echo("snow \\u2603")
    print_json({"snow": "\\u2603 \\U0001f600"}, indent=None)
sys.exit(run(command, []))
"""


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """``line`` with ``$D`` for the program."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    program = f"{sys.executable} -m deepinfer_core.cli"
    return subprocess.run(
        ["bash", "-c", line.replace("$D", program)],
        capture_output=True,
        timeout=60,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
    )


def said(ended: subprocess.CompletedProcess[bytes]) -> str:
    """The one line on standard error of a run that was a mistake."""
    assert ended.returncode == 2
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_behind_standard_output() -> None:
    assert said(shell("$D plugins > /dev/full")) == "cannot write or read: No space left on device"


def test_a_closed_standard_output_is_said_before_anything_runs() -> None:
    assert said(shell("$D plugins >&-")).startswith("standard output is closed: redirect it")


def test_a_closed_standard_error_is_no_other_file() -> None:
    ended = shell("$D explain --set logging.level=debug --model /no/such 2>&-; echo $?; $D plugins 2>&- | head -1")
    assert ended.stdout.decode().splitlines() == ["2", "# plugins"]


def test_a_closed_standard_input_is_no_prompt() -> None:
    assert said(shell("$D generate --model demo <&-")).startswith("no prompt: give --prompt")
    assert said(shell("$D generate --model demo --prompt-file - <&-")) == "prompt file standard input: holds no prompt"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("option", ["", " --prompt-file -"])
def test_bytes_that_are_no_text_on_standard_input(encoding: str, option: str) -> None:
    ended = shell(
        rf"printf 'caf\xe9 is' | $D generate --model demo{option}", PYTHONIOENCODING=f"{encoding}:surrogateescape"
    )
    assert said(ended).startswith("standard input: byte 3 is not")


def test_bytes_that_are_no_text_on_the_command_line() -> None:
    text = said(shell(r"$D generate --model demo --prompt $'caf\xe9'", PYTHONUTF8="1"))
    assert text.startswith("--prompt 'caf\\udce9': character 3 is not UTF-8 text")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-8:surrogateescape"])
def test_what_an_encoding_lacks_is_escaped(encoding: str) -> None:
    # click writes UTF-8 where the locale says ASCII, which it holds for misconfigured
    ended = subprocess.run(
        [sys.executable, "-c", ECHO], capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    plain, record = ended.stdout.decode("utf-8" if encoding == "ascii" else encoding.partition(":")[0]).splitlines()
    assert plain in ("snow ☃", r"snow \u2603")
    assert json.loads(record) == {"snow": "☃ 😀"}


def test_a_terminal_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.StringIO):
        def read(self, *_: object) -> str:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stdin", Broken())
    assert main(list(MODEL)) == 2
    assert capsys.readouterr().err == "error: standard input: Input/output error\n"


def test_json_deeper_than_the_parser_goes(
    refused: Callable[..., str], fake_llm: type[FakeLLM], checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000)
    assert refused(*MODEL, "--prompt-file", str(file)).startswith(f"{file}:1: not JSON: ")
    (checkpoint / "config.json").write_text("[" * 100_000)
    assert "config.json: cannot be read as JSON" in refused("inspect", str(checkpoint))


def test_a_report_that_cannot_be_written_leaves_the_table(run: Callable[..., Any], tmp_path: Path) -> None:
    policy = "deepinfer_core.engine.fcfs:FirstComeFirstServed"
    result = run("conformance", "--policy", policy, "--report", str(tmp_path))
    assert result.code == 2
    assert "**passed**" in result.out
    assert result.err.endswith(f"error: {tmp_path}: Is a directory\n")
