"""Tables and JSON."""

from __future__ import annotations

import json

import pytest

from deepinfer_core.cli.output import plain, print_table, size


def test_a_pipe_gets_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("things", ("name", "n"), [("long name", 1), ("x", None)])
    assert capsys.readouterr().out == "# things\nname       n\nlong name  1\nx\n"


def test_a_terminal_gets_a_table_that_takes_text_literally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_table("things", ("name",), [("[bold]kept[/bold]",)])
    out = capsys.readouterr().out
    assert "# things" not in out
    assert "[bold]kept[/bold]" in out


def test_an_empty_table_keeps_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("things", ("name", "n"), [])
    assert capsys.readouterr().out == "# things\nname  n\n"


def test_numbers_that_json_lacks_become_null() -> None:
    value = {1: (float("nan"), float("-inf"), 1.5), "s": {"b", "a"}}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {"1": [None, None, 1.5], "s": ["a", "b"]}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
