"""The adapters' calls against the real torch_npu: schemas accept them, Meta kernels promise what the contract does.

torch_npu is installed into an environment of its own that sees this one's torch, since beside a torch it is imported
with it; CANN is stood in for by empty libraries. Skipped, with the reason, where that is impossible.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend950 import stub_runtime
from ascend950.emulation import schemas

VERSION = "2.13.0"
OTHER_VERSION = "2.14.0"
TESTS = Path(__file__).parents[1]
YAML = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"torch_npu cannot be installed here: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines that ``meta_calls.py`` prints."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the stand-ins are x86-64 assembly, not {platform.machine()}")
    if not torch.__version__.startswith(VERSION.rpartition(".")[0]):
        pytest.skip(f"torch_npu {VERSION} goes with torch {VERSION.rpartition('.')[0]}, not {torch.__version__}")
    if torch.version.cuda is not None:
        pytest.skip(f"torch_npu loads beside a torch built for the host, not one for CUDA {torch.version.cuda}")
    if missing := stub_runtime.missing_tools():
        pytest.skip(f"{', '.join(missing)} is not installed; it builds the stand-ins for CANN")
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    folder = (
        tmp_path_factory.mktemp("kept")
        if cache is None
        else cache.mkdir(f"torch_npu-{VERSION}-{sys.version_info.minor}")
    )
    if not (folder / "ready").exists():
        _prepare(folder)
        (folder / "ready").touch()
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder / "stubs"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [str(folder / "venv/bin/python"), str(TESTS / "ascend950/meta_calls.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _prepare(folder: Path) -> None:
    venv.create(folder / "venv", with_pip=False, clear=True)
    site = next((folder / "venv").glob("lib/python3*/site-packages"))
    _pip("install", "--no-deps", "--target", str(site), f"torch-npu=={VERSION}", "pyyaml")
    torch_folder = Path(torch.__file__).parent
    stub_runtime.build(site / "torch_npu", torch_folder, folder / "stubs")


def test_every_case_gives_what_the_contract_promises(answers: list[dict[str, Any]]) -> None:
    cases = [answer for answer in answers if "case" in answer]
    assert len(cases) >= 30
    failed = [case for case in cases if case.get("found") != case.get("promised") or "error" in case]
    assert not failed


def test_the_emulated_schemas_are_those_of_torch_npu(answers: list[dict[str, Any]]) -> None:
    real = set(answers[0]["schemas"])
    assert {f"npu::{schema}" for schema in schemas().values()} <= real


def test_the_next_version_declares_the_same_functions(tmp_path: Path) -> None:
    """By the wheel's own list: its torch is another one, so that it cannot be imported beside this one."""
    _pip("download", "--no-deps", "--dest", str(tmp_path), f"torch-npu=={OTHER_VERSION}")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        declared = archive.read(YAML).decode()
    for name in schemas():
        assert f"func: {name}(" in declared
