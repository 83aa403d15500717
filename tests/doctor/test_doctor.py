"""Every illness is found, named, and comes with a command; what is healthy is left alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ill_plugins import ILL

from deepinfer_core.api import DeviceError
from deepinfer_core.cli import main
from deepinfer_core.doctor import Diagnosis, Finding, examine
from deepinfer_core.doctor.ask_child import ask
from deepinfer_core.doctor.plugin_facts import declared_findings, stopped
from deepinfer_core.doctor.settings import given_settings
from deepinfer_core.doctor.watch import Watch
from deepinfer_core.plugins import Candidate

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
OTHERS = {
    "DEEPINFER_KV_CACHE__BLOCKSIZE": "8",
    "DEEPINFER_KV_CACHE__NUM_BLOCKS": "many",
    "DEEPINFER_HEAVY__SPEED": "2",
    "DEEPINFER_SETTLED__SPEED": "fast",
    "DEEPINFER_SETTLED__SPED": "4",
}


@pytest.fixture(scope="module")
def seen(ward: Path) -> Diagnosis:
    """One examination of everything, with mistakes in the environment too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ward))
        return examine(environ={**CLEAN, **OTHERS})


def about(seen: Diagnosis, plugin: str, check: str) -> Finding:
    found = [finding for finding in seen.findings if (finding.plugin, finding.check) == (plugin, check)]
    assert len(found) == 1, seen.findings
    return found[0]


EXPECTED: Mapping[tuple[str, str], tuple[str, str, str]] = {
    ("heavy", "heavy imports"): ("warning", "imports torch", "python -X importtime -c 'import heavy_plugin'"),
    ("opener", "device touched"): ("warning", "opens /dev/acme0", "strace"),
    ("slow", "import cost"): ("warning", "s of processor time", "python -X importtime -c 'import slow_plugin'"),
    ("exits", "load"): ("error", "SystemExit: 3", "pip install --force-reinstall exits-dist"),
    ("misspelt", "load"): ("error", "deepinfer_probe", "pip install --force-reinstall misspelt-dist"),
    ("raises", "hooks"): ("error", "no libacme.so", "deepinfer plugins --load"),
    ("newtorch", "torch build"): ("error", "needs torch>=99; installed: ", "pip install 'torch>=99'"),
    ("needy", "requirements"): ("error", "no-such-thing>=2; installed: none", "pip install 'no-such-thing>=2'"),
    ("absent", "driver"): ("note", "driver 1.2 is too old", "absent-smi --version"),
    ("acme", "architecture"): ("error", "'a2'; this package was built for a1, a3", "pip install --upgrade acme-dist"),
    ("acme", "operators"): ("error", "No module named 'acme_kernels'", "pip install --force-reinstall acme-dist"),
    ("acme", "names"): (
        "warning",
        "acme:slip has op 'gemm.liner', which nothing asks for: write 'gemm.linear'",
        "deepinfer explain --accelerator acme",
    ),
    ("acme", "plan"): ("error", "fallback is 'error'", "export DEEPINFER_FALLBACK=warn"),
    ("foreign", "plan"): ("error", "fallback is 'error'", "export DEEPINFER_FALLBACK=warn"),
    ("settled", "settings"): ("error", "plugins.settled.speed", "unset DEEPINFER_SETTLED__SPEED"),
}


@pytest.mark.parametrize(("plugin", "check"), EXPECTED)
def test_an_illness_is_found(seen: Diagnosis, plugin: str, check: str) -> None:
    severity, text, fix = EXPECTED[plugin, check]
    finding = about(seen, plugin, check)
    assert finding.severity == severity
    assert text in finding.text
    assert fix in finding.fix


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "DEEPINFER_SETTLED__SPEED"])
def test_each_variable_that_sets_nothing_is_a_finding_of_its_own(seen: Diagnosis, name: str) -> None:
    found = [finding for finding in seen.findings if finding.fix == f"unset {name}"]
    assert len(found) == 1
    assert name in found[0].text or name.rpartition("__")[2].lower() in found[0].text
    assert found[0].severity == "error"


def planted(seen: Diagnosis) -> list[Finding]:
    """Without those about other plugins of this environment, which may lack their devices."""
    names = {"", *(plugin for plugin, _ in EXPECTED)}
    return [finding for finding in seen.findings if finding.plugin in names]


def test_nothing_else_is_found(seen: Diagnosis) -> None:
    known = {*EXPECTED, ("", "environment")}
    others = [finding for finding in planted(seen) if (finding.plugin, finding.check) not in known]
    assert others == []


def test_every_finding_ends_with_a_command(seen: Diagnosis) -> None:
    programs = {"pip", "python", "deepinfer", "unset", "export", "strace", "absent-smi"}
    assert len(seen.findings) >= len(EXPECTED)
    for finding in planted(seen):
        assert "\n" not in finding.text
        assert shlex.split(finding.fix)[0] in programs, finding


def test_the_host_is_well(seen: Diagnosis) -> None:
    plans = dict(seen.backends)
    assert plans["cpu"].endswith("loop synchronous: this device shares its cores with the host")
    assert {"acme", "cpu"} <= set(plans)
    cpu = next(plugin for plugin in seen.plugins if plugin.name == "cpu")
    assert cpu.hooks > 5
    assert cpu.devices[0].startswith("cpu (")
    assert seen.worst() == "error"


def test_the_one_who_asks_imports_no_torch_and_no_plugin() -> None:
    script = (
        "import sys; from deepinfer_core.doctor import examine; examine(backend='cpu');"
        "print('torch' in sys.modules, 'deepinfer_core.cpu.plugin' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=CLEAN, capture_output=True, text=True, check=False)
    assert done.stdout == "False False\n", done.stderr


# ---- children that do not come back


def question(name: str) -> dict[str, Any]:
    return {"job": "declare", "file": None, "name": name, "pin": f"{name}@{name}-dist", "entry_point": f"{name}_plugin"}


def candidate(name: str) -> Candidate:
    return Candidate(
        name=name, distribution=f"{name}-dist", version="1.0", entry_point=f"{name}_plugin", path="", editable=False
    )


@pytest.mark.parametrize(
    ("alone", "name", "trouble"),
    [("hangs", "hangs", "no answer within 10 s"), ("dies", "dies", "killed by SIGKILL")],
    indirect=["alone"],
)
def test_a_probe_that_hangs_or_ends_its_process_is_one_finding(
    alone: Path, name: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ILL[name].fatal
    monkeypatch.syspath_prepend(str(alone))
    answer = ask(question(name), timeout=10, environ=CLEAN)
    assert (answer.trouble, answer.stage) == (trouble, "probe")
    finding = stopped(candidate(name), answer)
    assert f"{trouble}, at stage 'probe'" in finding.text
    assert finding.fix == f"pip uninstall {name}-dist"


# ---- parts


def test_a_backend_that_was_asked_for_must_have_its_device() -> None:
    facts = {
        "failure": "", "heavy": [], "opened": [], "import_seconds": 0.0, "hook_seconds": 0.0, "hook_failures": [],
        "bad_settings": [],
        "devices": [], "archs": [], "absent": [{"backend": "absent", "reason": "no card", "fix": "lspci"}],
    }  # fmt: skip
    (finding,) = declared_findings(candidate("absent"), facts, asked="absent")
    assert (finding.severity, finding.fix) == ("error", "lspci")
    (finding,) = declared_findings(candidate("absent"), facts, asked=None)
    assert finding.severity == "note"


def test_an_unknown_backend_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(DeviceError, match=r"'cpi': no plugin has it.*cpu"):
        examine(backend="cpi", environ=CLEAN)


def test_a_backend_of_another_interface_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "newer_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newer-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deepinfer.plugins.v99]\nnewer = newer_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = examine(backend="newer", environ=CLEAN).findings
    assert (finding.plugin, finding.check, finding.severity) == ("newer", "version", "error")
    assert "99" in finding.text


def test_a_file_with_a_mistake_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text("[kv_cache]\nblock_sise = 4\n")
    given, (finding,) = given_settings({"DEEPINFER_KV_CACHE__BLOCK_SIZE": "8"}, str(file))
    assert given.load().kv_cache.block_size == 8
    assert "block_sise" in finding.text
    assert finding.fix.endswith(str(file))


WATCHED = """
import os, sys
from deepinfer_core.doctor.watch import Watch
watch = Watch()
open("/dev/null").close()
read, write = os.openpty()
import ctypes
ctypes.CDLL("libc.so.6")
import subprocess
subprocess.run([sys.executable, "-c", ""])
subprocess.run(["true"])
seen = watch.stop()
open("/dev/full").close()
print(seen)
"""


def test_devices_opened_behind_pythons_back_are_seen_by_their_descriptors() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False, env=CLEAN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['libc.so.6', 'program true', '/dev/ptmx']"
    assert Watch.__doc__


# ---- the command


def test_the_command_prints_a_verdict_and_its_exit_code_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert said["findings"] == []
    assert [name for name, _ in said["backends"]] == ["cpu"]


def test_a_mistake_in_the_environment_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_NONSENSE", "1")
    assert main(["doctor", "--backend", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "DEEPINFER_NONSENSE" in line)
    assert lines[at].startswith("error: environment: unknown environment variable DEEPINFER_NONSENSE")
    assert lines[at + 1] == "  fix: unset DEEPINFER_NONSENSE"


def test_an_unknown_backend_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: --backend 'nothing'")
