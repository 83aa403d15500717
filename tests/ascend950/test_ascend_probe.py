"""The probe names the first thing that is missing, and opens nothing."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepinfer_ascend950 import requirements
from deepinfer_ascend950.environment import DEFAULTS, apply
from deepinfer_ascend950.plugin import deepinfer_probe
from deepinfer_ascend950.probe import chips, find

from deepinfer_core.api import DeviceInfo, NoDevice, ProbeEnv

TABLE = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              {chip}
\t0                              1                              -                              Mcu
\t3                              0                              1                              {chip}
\t3                              1                              -                              Mcu
"""
CANN_INFO = f"usr/local/Ascend/ascend-toolkit/latest/{platform.machine()}-linux/ascend_toolkit_install.info"


def machine(
    root: Path, *, device: bool = True, driver: bool = True, cann: str | None = "8.5.0", home: str | None = None
) -> ProbeEnv:
    if device:
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev/davinci0").touch()
        (root / "dev/davinci_manager").touch()
    if driver:
        path = root / requirements.DRIVER_VERSION
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("Version=25.5.0\nascendhal_version=7.35.23\n")
    if cann is not None:
        path = root / (CANN_INFO if home is None else f"{home}/{platform.machine()}-linux/ascend_toolkit_install.info")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"package_name=Ascend-cann-toolkit\nversion={cann}\narch={platform.machine()}\n")
    return ProbeEnv(environ={} if home is None else {"ASCEND_HOME_PATH": f"/{home}"}, root=str(root))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu 2.13.0, as package metadata would say."""
    real = requirements.metadata.version

    def version(name: str) -> str:
        return "2.13.0" if name == "torch-npu" else real(name)

    monkeypatch.setattr(requirements.metadata, "version", version)


def answer(text: str = TABLE.format(chip="Ascend 950PR")) -> Any:
    return lambda environ: text


def silent(environ: Any) -> str:
    raise OSError("npu-smi ended with 255: dcmi module initialize failed")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("version", ["8.5.0", "8.5.RC1", "9.0.0"])
def test_a_whole_machine_is_one_device_record(tmp_path: Path, version: str) -> None:
    found = find(machine(tmp_path, cann=version), answer())
    assert isinstance(found, DeviceInfo)
    assert (found.backend, found.type, found.arch, found.count) == ("ascend950", "npu", "Ascend 950PR", 2)
    assert found.fallback == "warn"
    assert found.legacy_names == ("ascend",)
    assert found.evidence == f"/dev/davinci0, 2 x Ascend 950PR, driver 25.5.0, CANN {version}, torch_npu 2.13.0"


@pytest.mark.usefixtures("installed")
def test_cann_is_looked_for_where_its_set_env_says(tmp_path: Path) -> None:
    assert isinstance(find(machine(tmp_path, home="opt/cann"), answer()), DeviceInfo)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("parts", "query", "reason", "fix"),
    [
        ({"device": False}, answer(), "no device file", "ls /dev/davinci*"),
        ({"driver": False}, answer(), "davinci0 found, but no driver", "npu-smi info"),
        ({"cann": None}, answer(), "no CANN toolkit", "source /usr/local/Ascend/ascend-toolkit/set_env.sh"),
        ({"cann": "8.1.RC1"}, answer(), "CANN 8.1.RC1 is not one of >=8.5rc1", "install CANN >=8.5rc1"),
        ({"cann": "latest"}, answer(), "CANN latest is not one of", "install CANN"),
        ({}, silent, "dcmi module initialize failed", "npu-smi info -m"),
        ({}, answer(TABLE.format(chip="Ascend 910B4")), "shows Ascend 910B4; supported: Ascend 950", "npu-smi"),
        ({}, answer(""), "shows no chip", "npu-smi"),
    ],
)
def test_the_first_missing_part_is_named_with_its_fix(
    tmp_path: Path, parts: dict[str, Any], query: Any, reason: str, fix: str
) -> None:
    found = find(machine(tmp_path, **parts), query)
    assert isinstance(found, NoDevice)
    assert reason in found.reason
    assert fix in found.fix


def test_without_torch_npu_the_one_for_this_torch_is_named(tmp_path: Path) -> None:
    found = find(machine(tmp_path), answer())
    assert isinstance(found, NoDevice)
    assert "torch_npu is not installed" in found.reason
    torch = ".".join(requirements.metadata.version("torch").split(".")[:2])
    assert f"torch-npu=={torch}.*" in found.fix


def test_another_torch_npu_is_refused_with_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.metadata, "version", lambda name: "2.1.0.post13")
    found = find(machine(tmp_path), answer())
    assert isinstance(found, NoDevice)
    assert found.reason.endswith("torch_npu 2.1.0.post13 is not one of <2.15,>=2.11")


def test_a_machine_without_a_device_file_starts_no_process(tmp_path: Path) -> None:
    def never(environ: Any) -> str:
        raise AssertionError("asked")

    assert isinstance(find(machine(tmp_path, device=False), never), NoDevice)


def test_lines_of_management_controllers_and_of_the_header_are_no_chips() -> None:
    assert chips(TABLE.format(chip="Ascend 950DT")) == ["Ascend 950DT", "Ascend 950DT"]


def test_a_query_tool_that_is_missing_is_an_answer(tmp_path: Path, installed: None) -> None:
    env = machine(tmp_path)
    (found,) = deepinfer_probe(ProbeEnv(environ={"PATH": str(tmp_path)}, root=env.root))
    assert isinstance(found, NoDevice)
    assert "the driver does not answer" in found.reason


def test_declaring_imports_no_torch() -> None:
    code = (
        "import sys; from deepinfer_ascend950 import plugin; from deepinfer_core.api import ProbeEnv; "
        "plugin.deepinfer_probe(ProbeEnv(environ={})); from deepinfer_ascend950.capabilities import table; table(); "
        "sys.exit('torch' in sys.modules or 'torch_npu' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_variables_of_the_user_stay_and_the_others_are_set() -> None:
    environ = {"HCCL_DETERMINISTIC": "false"}
    applied = apply(environ, imported=False)
    assert environ == {**DEFAULTS, "HCCL_DETERMINISTIC": "false"}
    assert applied.kept == ("HCCL_DETERMINISTIC",)
    assert not applied.too_late


def test_variables_that_come_too_late_are_not_set_but_told() -> None:
    environ: dict[str, str] = {}
    applied = apply(environ, imported=True)
    assert environ == {}
    assert applied.too_late
    assert applied.set == ()
