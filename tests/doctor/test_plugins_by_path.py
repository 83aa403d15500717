"""A plugin that ``plugins.paths`` names is examined as an installed one is; what mends it is no pip."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from ill_plugins import source

from deepinfer_core.api import DeviceError
from deepinfer_core.doctor import Diagnosis, Finding, examine

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}


def seen(*items: Path | str, backend: str | None = None) -> Diagnosis:
    return examine(backend=backend, environ={**CLEAN, "DEEPINFER_PLUGINS__PATHS": ",".join(map(str, items))})


def written(folder: Path, *names: str) -> list[Path]:
    files = [folder / f"{name}_plugin.py" for name in names]
    for name, file in zip(names, files, strict=True):
        file.write_text(source(name), encoding="utf-8")
    return files


def one(found: Diagnosis, plugin: str, check: str) -> Finding:
    (finding,) = (finding for finding in found.findings if (finding.plugin, finding.check) == (plugin, check))
    return finding


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    return seen(*written(tmp_path_factory.mktemp("loose"), "acme", "foreign"))


@pytest.mark.parametrize(
    ("plugin", "check", "says"),
    [
        ("acme", "architecture", "'a2'; this package was built for a1, a3"),
        ("acme", "operators", "No module named 'acme_kernels'"),
        ("acme", "names", "write 'gemm.linear'"),
        ("acme", "plan", "fallback is 'error'"),
        ("foreign", "plan", "fallback is 'error'"),
    ],
)
def test_its_backend_is_started(started: Diagnosis, plugin: str, check: str, says: str) -> None:
    assert (plugin, "(plugins.paths)") in [(seen.name, seen.distribution) for seen in started.plugins]
    assert plugin in dict(started.backends)
    finding = one(started, plugin, check)
    assert says in finding.text
    assert "pip" not in shlex.split(finding.fix)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "loose_package").mkdir()
    (folder / "loose_package" / "__init__.py").touch()
    (folder / "loose_package" / "dotted.py").write_text("import nothing_here\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        files = written(folder, "heavy", "exits", "misspelt", "raises", "dies")
        return seen(*files, folder / "lost.py", "loose_package.dotted")


@pytest.mark.parametrize(
    ("plugin", "check", "says", "fix"),
    [
        ("heavy", "heavy imports", "imports torch", "python -X importtime /"),
        ("exits_plugin", "load", "SystemExit: 3", "python /"),
        ("misspelt_plugin", "load", "deepinfer_prob", "python /"),
        ("raises", "hooks", "no libacme.so", "deepinfer plugins --load"),
        ("dies_plugin", "probe", "killed", "python /"),
        ("lost", "load", "no such file", "python /"),
        ("dotted", "load", "No module named 'nothing_here'", "python -c 'import loose_package.dotted'"),
    ],
)
def test_an_illness_is_found(broken: Diagnosis, plugin: str, check: str, says: str, fix: str) -> None:
    """What cannot be loaded has told no name: it goes by its file's."""
    finding = one(broken, plugin, check)
    assert says in finding.text
    assert finding.fix.startswith(fix)


def test_no_file_has_the_backend_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="'gone': no plugin has it"):
        seen(*written(tmp_path, "settled"), backend="gone")
