"""``deepinfer plugins``: real throw-away distributions on the path, and what is said of each."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Run

BUILT_IN = {"cpu", "engine", "models", "reference"}

GOOD = """
import attrs
from deepinfer_core.api import CommandInfo, LazyRef, PluginInfo, hookimpl

@attrs.frozen
class Settings:
    speed: int = 1

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="{name}", help="does good", settings=Settings)

@hookimpl
def deepinfer_commands():
    return [CommandInfo(name="shine", help="Shine.", command=LazyRef("{module}:shine"))]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a distribution with one plugin on the path."""
    import sys

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def call(
        name: str, *, dist: str = "", code: str | None = GOOD, version: str = "1.2", group: str = "v1", folder: str = ""
    ) -> None:
        dist = dist or f"dist-{name}"
        module = f"plug_{dist.replace('-', '_')}"
        if code is not None:
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(code).format(name=name, module=module))
        info = tmp_path / (folder or f"{dist.replace('-', '_')}-{version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[deepinfer.plugins.{group}]\n{name} = {module}\n")

    yield call
    for module in set(sys.modules) - before:
        if module.startswith("plug_"):
            del sys.modules[module]


def rows(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    result = run("plugins", "--json", *arguments)
    assert result.code == 0, result.err
    return {row["name"]: row for row in json.loads(result.out)}


def test_the_cores_own_are_listed(run: Run) -> None:
    found = rows(run)
    assert set(found) >= BUILT_IN
    assert {found[name]["status"] for name in BUILT_IN} == {"ok"}


def test_installed_plugin(run: Run, install: Install) -> None:
    install("acme")
    row = rows(run)["acme"]
    assert (row["distribution"], row["version"], row["status"], row["api"]) == ("dist-acme", "1.2", "ok", "1.x")


def test_metadata_alone_is_read(run: Run, install: Install) -> None:
    install("acme", code="raise SystemExit('imported')")
    assert rows(run)["acme"]["status"] == "ok"


@pytest.mark.parametrize("arguments", [(), ("--load",)])
def test_blocked_plugin_is_skipped(arguments: tuple[str, ...], run: Run, install: Install) -> None:
    install("acme")
    assert rows(run, "--no-plugin", "acme", *arguments)["acme"]["status"] == "skipped"


def test_plugin_outside_the_allowlist_is_skipped(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme")
    install("other")
    monkeypatch.setenv("DEEPINFER_PLUGINS", "other")
    found = rows(run)
    assert (found["acme"]["status"], found["other"]["status"]) == ("skipped", "ok")


def test_other_interface_is_skipped_and_named(run: Run, install: Install) -> None:
    install("acme", group="v2")
    row = rows(run)["acme"]
    assert row["status"] == "skipped"
    assert "v2" in row["note"]


def test_metadata_without_code_is_stale(run: Run, install: Install) -> None:
    install("acme", code=None)
    assert rows(run)["acme"]["status"] == "stale"


def test_stale_metadata_beside_a_good_install_is_mentioned(run: Run, install: Install) -> None:
    install("acme")
    install("acme", version="0.9", code=None, folder="dist_acme.egg-info")
    row = rows(run)["acme"]
    assert (row["version"], row["status"]) == ("1.2", "ok")
    assert "ignored" in row["note"]


def test_same_name_from_two_distributions_is_shadowed(run: Run, install: Install) -> None:
    install("acme", dist="one")
    install("acme", dist="two")
    result = run("plugins", "--json")
    found = [row for row in json.loads(result.out) if row["name"] == "acme"]
    assert [(row["distribution"], row["status"]) for row in found] == [("one", "shadowed"), ("two", "shadowed")]
    assert "acme@one" in found[0]["note"]


def test_loading_shows_what_a_plugin_does(run: Run, install: Install) -> None:
    install("acme")
    row = rows(run, "--load")["acme"]
    assert (row["api"], row["note"], row["commands"], row["settings"]) == ("1.0", "does good", ["shine"], ["speed"])
    assert row["hooks"] == ["deepinfer_commands", "deepinfer_plugin"]


def test_loading_shows_what_fails(run: Run, install: Install) -> None:
    install("acme", code="raise SystemExit('no')")
    row = rows(run, "--load")["acme"]
    assert (row["status"], row["note"]) == ("failed", "SystemExit: no")


def test_failure_is_logged_beside_the_output(run: Run, install: Install) -> None:
    install("acme", code="raise ImportError('no driver')")
    result = run("plugins", "--load")
    assert "no driver" in result.err
    assert "plugin_failed" not in result.out


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("plugins.acme.speed=fast", "plugins.acme.speed = fast (from --set): expected an integer"),
        ("plugins.acme.spede=1", "did you mean 'plugins.acme.speed'?"),
        ("plugins.acne.speed=1", "no plugin of this name with settings is loaded; did you mean 'acme'?"),
    ],
)
def test_settings_are_checked_when_loaded(
    setting: str, said: str, refused: Callable[..., str], install: Install
) -> None:
    install("acme")
    assert said in refused("plugins", "--load", "--set", setting)


def test_asking_for_a_plugin_that_is_not_there_still_lists(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS", "acme")
    result = run("plugins")
    assert result.code == 2
    assert "reference" in result.out
    assert "no plugin named 'acme'" in result.err


def test_plain_output_has_one_line_per_plugin(run: Run, install: Install) -> None:
    install("acme")
    lines = run("plugins").out.splitlines()
    assert lines[0] == "# plugins"
    assert lines[1].split()[:4] == ["name", "distribution", "version", "status"]
    names = [line.split()[0] for line in lines[2:]]
    assert names == sorted(names)
    assert {*BUILT_IN, "acme"} <= set(names)  # this environment may have others


def test_plugin_from_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plug_file.py"
    file.write_text(GOOD.format(name="filed", module="plug_file"))
    row = rows(run, "--load", "--set", f"plugins.paths={file}")["filed"]
    assert (row["status"], row["path"]) == ("ok", str(file))
