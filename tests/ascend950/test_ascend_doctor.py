"""What ``deepinfer doctor --backend ascend950`` says on machines that lack one thing each: golden texts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from ascend950.test_ascend_probe import TABLE, machine

TESTS = Path(__file__).parents[1]
INFO = f"usr/local/Ascend/ascend-toolkit/latest/{platform.machine()}-linux/ascend_toolkit_install.info"


@attrs.frozen(kw_only=True)
class Case:
    """A machine: its device file, CANN, torch_npu as package metadata, and chip; and what the doctor says of it."""

    device: bool = True
    cann: str | None = "9.0.0"
    torch_npu: str | None = "2.13.0"
    chip: str | None = "Ascend 950PR"
    says: str
    fix: str


CASES = {
    "nothing installed": Case(
        device=False,
        cann=None,
        torch_npu=None,
        chip=None,
        says="no device file {root}/dev/davinci0",
        fix="check: ls /dev/davinci*; npu-smi info",
    ),
    "no device": Case(
        device=False, says="no device file {root}/dev/davinci0", fix="check: ls /dev/davinci*; npu-smi info"
    ),
    "torch_npu without CANN": Case(
        cann=None,
        says="davinci0 found, but no CANN toolkit: {root}/" + INFO + " is missing",
        fix="install CANN and run: source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    "wrong CANN version": Case(
        cann="8.1.RC1",
        says="davinci0 found, but CANN 8.1.RC1 is not one of >=8.5rc1",
        fix="install CANN >=8.5rc1 and run its set_env.sh; check: cat {root}/" + INFO,
    ),
    "CANN without torch_npu": Case(
        torch_npu=None,
        says="davinci0 found, but torch_npu is not installed",
        fix="pip install 'torch-npu=={torch}.*' (the one for torch {torch})",
    ),
    "another chip": Case(
        chip="Ascend 910B4",
        says="npu-smi shows Ascend 910B4; supported: Ascend 950",
        fix="check: npu-smi info -m",
    ),
    "no query tool": Case(
        chip=None,
        says=("davinci0 found, but the driver does not answer: [Errno 2] No such file or directory: 'npu-smi'"),
        fix="check: npu-smi info -m",
    ),
}


def metadata(site: Path, name: str, version: str, entry_point: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_point:
        (folder / "entry_points.txt").write_text(f"[deepinfer.plugins.v1]\n{entry_point}\n")


@pytest.mark.parametrize("name", CASES)
def test_doctor_names_what_is_missing_and_its_fix(name: str, tmp_path: Path) -> None:
    import torch

    case = CASES[name]
    root, site, tools = tmp_path / "root", tmp_path / "site", tmp_path / "bin"
    root.mkdir()
    tools.mkdir()
    machine(root, device=case.device, driver=case.device, cann=case.cann)
    metadata(site, "rooted-ascend", "0.1", "rooted = ascend950.rooted_plugin")
    if case.torch_npu:
        metadata(site, "torch-npu", case.torch_npu)
    if case.chip:
        tool = tools / "npu-smi"
        tool.write_text(f"#!/bin/sh\n/bin/cat <<'TABLE'\n{TABLE.format(chip=case.chip)}TABLE\n")
        tool.chmod(0o755)
    environ = {
        **{key: value for key, value in os.environ.items() if not key.startswith("ASCEND")},
        "ASCEND_TEST_ROOT": str(root),
        "DEEPINFER_PLUGINS": "reference,cpu,models,engine,rooted",
        "PATH": str(tools),
        "PYTHONPATH": os.pathsep.join([str(site), str(TESTS), *(path for path in sys.path if path)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_core.cli", "doctor", "--backend", "ascend950"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = [line.strip() for line in done.stdout.splitlines() if line.strip()][-2:]
    fields = {"root": root, "torch": ".".join(torch.__version__.split(".")[:2])}
    assert found == [
        f"error: rooted: driver: no device for backend 'ascend950': {case.says.format(**fields)}",
        f"fix: {case.fix.format(**fields)}",
    ]
