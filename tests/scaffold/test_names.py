"""A name or a directory that cannot be used is one line that says why."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from deepinfer_core.api import ConfigError
from deepinfer_core.cli import main
from deepinfer_core.scaffold import KINDS, new_backend, new_plugin
from deepinfer_core.scaffold.names import ProjectName, check_name


@pytest.mark.parametrize("name", ["", "Acme", "my-chip", "1chip", "a b", "class", "ch_", "a__b", "../x", "é"])
def test_no_identifier_in_lower_case(name: str) -> None:
    with pytest.raises(ConfigError, match="use a lower-case identifier"):
        check_name(name)


@pytest.mark.parametrize("name", ["cpu", "reference", "models", "engine"])
def test_a_plugins_name_is_taken(name: str) -> None:
    with pytest.raises(ConfigError, match=f"name '{name}': taken by a plugin of deepinfer-core"):
        check_name(name)


@pytest.mark.parametrize("name", ["auto", "none"])
def test_a_name_with_a_meaning_is_reserved(name: str) -> None:
    with pytest.raises(ConfigError, match=f"name '{name}': has a meaning of its own"):
        check_name(name)


def test_a_name_that_a_policy_or_sink_has_is_taken(tmp_path: Path) -> None:
    """The generated plugin would make ``fcfs``, the default, mean two things."""
    for name, kind, what in (("fcfs", "scheduler", "policy"), ("prometheus", "metrics", "sink")):
        with pytest.raises(ConfigError, match=f"name '{name}': taken by a {what} of plugin 'engine'"):
            new_plugin(name, kind, directory=tmp_path / name)
    assert new_plugin("fcfs", "metrics", directory=tmp_path / "sink_called_fcfs")


def test_an_installed_package_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepinfer_zork.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="a package deepinfer_zork is installed already"):
        check_name("zork")


def test_what_is_made_of_a_name() -> None:
    name = ProjectName("my_chip")
    assert (name.distribution, name.package, name.camel, name.title) == (
        "deepinfer-my-chip", "deepinfer_my_chip", "MyChip", "My chip",
    )  # fmt: skip


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; name another with --directory"):
        new_backend("zork", directory=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_directory_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/no"):
        new_plugin("zork", "metrics", directory=tmp_path / "no" / "zork")


def test_an_unknown_kind_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kind 'shcedule': expected one of scheduler, speculation, "):
        new_plugin("zork", "shcedule", directory=tmp_path / "zork")


def test_a_device_type_that_torch_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device-type 'my chip'"):
        new_backend("zork", directory=tmp_path / "zork", device_type="my chip")
    assert not (tmp_path / "zork").exists()


def test_the_program_writes_where_it_is_told_and_says_what_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "zork"]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "deepinfer-zork" / "deepinfer_zork" / "plugin.py").is_file()
    assert said.endswith("next:\n  pip install -e deepinfer-zork\n  deepinfer conformance zork --tier boots\n")
    for kind in KINDS:
        assert main(["new-plugin", f"my_{kind}", "--kind", kind, "--directory", kind]) == 0
        assert (tmp_path / kind / "pyproject.toml").is_file()
    assert main(["new-backend", "zork"]) == 2
    error = capsys.readouterr().err
    assert error == "error: directory deepinfer-zork: exists already; name another with --directory\n"


def test_nothing_of_a_generated_project_is_importable_here() -> None:
    assert importlib.util.find_spec("deepinfer_zork") is None
