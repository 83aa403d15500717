"""The probe on machines that are not there, and what users read where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from deepinfer_nvidia_sm100 import plugin, probe

from deepinfer_core import LLM
from deepinfer_core.api import DeviceError, NoDevice, ProbeEnv

H200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multiprocessors": 132, "memory": 150_000_000_000}
B200 = {"name": "NVIDIA B200", "major": 10, "minor": 0, "multiprocessors": 148, "memory": 190_000_000_000}
A100 = {"name": "NVIDIA A100", "major": 8, "minor": 0, "multiprocessors": 108, "memory": 80_000_000_000}


def machine(tmp_path: Path, files: int = 1) -> ProbeEnv:
    (tmp_path / "dev").mkdir(parents=True)
    for name in ("nvidiactl", *(f"nvidia{n}" for n in range(files))):
        (tmp_path / "dev" / name).touch()
    return ProbeEnv(environ={"A": "1"}, root=str(tmp_path))


def answering(*devices: Mapping[str, Any]) -> probe.Query:
    return lambda environ: {"driver": 13000, "devices": devices}


def test_devices_of_one_kind_are_one_record(tmp_path: Path) -> None:
    found = probe.find(machine(tmp_path, 2), answering(H200, H200))
    (info,) = found.devices
    assert (info.backend, info.type, info.arch, info.count) == ("nvidia_sm100", "cuda", "sm_90", 2)
    assert info.memory == H200["memory"]
    assert "NVIDIA H200, compute capability 9.0, 132 multiprocessors, driver for CUDA 13.0" in info.evidence
    assert (info.fallback, info.legacy_names, found.reason) == ("warn", ("nvidia",), "")


def test_the_newer_generation_is_found_too(tmp_path: Path) -> None:
    (info,) = probe.find(machine(tmp_path), answering(B200)).devices
    assert info.arch == "sm_100"


def test_a_machine_without_a_device_file_is_not_asked(tmp_path: Path) -> None:
    def never(environ: Mapping[str, str]) -> Mapping[str, Any]:
        raise AssertionError("the driver was asked")

    found = probe.find(ProbeEnv(environ={}, root=str(tmp_path)), never)
    assert not found.devices
    assert "no device file" in found.reason


def test_an_older_device_is_named_with_what_is_supported(tmp_path: Path) -> None:
    found = probe.find(machine(tmp_path), answering(A100))
    assert not found.devices
    assert found.reason == "NVIDIA A100 has compute capability 8.0; supported: 9.0, 10.0, 10.3"


def test_a_driver_that_hides_all_devices(tmp_path: Path) -> None:
    assert probe.find(machine(tmp_path), answering()).reason == "the driver shows no device"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        (answering(), "the driver shows no device"),
        (answering(A100), "NVIDIA A100 has compute capability 8.0; supported: 9.0, 10.0, 10.3"),
    ],
)
@pytest.mark.parametrize("visible", ["", "1,0"])
def test_what_hides_devices_is_named_with_its_value(
    tmp_path: Path, query: probe.Query, said: str, visible: str
) -> None:
    env = attrs.evolve(machine(tmp_path), environ={"CUDA_VISIBLE_DEVICES": visible})
    assert probe.find(env, query).reason == f"{said}; CUDA_VISIBLE_DEVICES is {visible!r}"


def test_a_missing_driver_is_a_reason(tmp_path: Path) -> None:
    def missing(environ: Mapping[str, str]) -> Mapping[str, Any]:
        raise probe.NoDriver("libcuda.so.1: cannot open shared object file: no such file")

    found = probe.find(machine(tmp_path), missing)
    assert not found.devices
    assert "nvidia0 found, but no working driver: libcuda.so.1: cannot open" in found.reason
    assert not found.reason.endswith("CUDA_VISIBLE_DEVICES is ''")
    hidden = attrs.evolve(machine(tmp_path / "hidden"), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert probe.find(hidden, missing).reason.endswith("such file; CUDA_VISIBLE_DEVICES is ''")


FAKE_DRIVER = """
#include <string.h>
#include <stddef.h>
int cuInit(unsigned f) { return REFUSES; }
#if NAMES
int cuGetErrorString(int e, const char **s) { if (e != 100) return 1; *s = "no device is detected"; return 0; }
#endif
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, d ? "Second" : "First", n); return 0; }
int cuDeviceTotalMem_v2(size_t *m, int d) { *m = 6000000000UL; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : 132; return 0; }
"""


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver library with two devices, or one that refuses."""

    def make(refuses: int = 0, names: int = 1) -> None:
        source, library = tmp_path / "driver.c", tmp_path / "libfake.so"
        source.write_text(FAKE_DRIVER)
        built = ["cc", "-shared", "-fPIC", f"-DREFUSES={refuses}", f"-DNAMES={names}", "-o", str(library), str(source)]
        try:
            subprocess.run(built, check=True, capture_output=True)
        except OSError:
            pytest.skip("no C compiler")
        monkeypatch.setattr(probe, "LIBRARY", str(library))

    return make


def test_the_driver_is_asked_in_a_process_of_its_own(fake_driver: Any) -> None:
    fake_driver()
    answer = probe.ask_driver({})
    assert answer["driver"] == 12080
    assert [d["name"] for d in answer["devices"]] == ["First", "Second"]
    assert answer["devices"][1] == {
        "name": "Second",
        "major": 9,
        "minor": 0,
        "multiprocessors": 132,
        "memory": 6_000_000_000,
    }


@pytest.mark.parametrize(
    ("refuses", "names", "said"),
    [(100, 1, "error 100, no device is detected$"), (804, 1, "error 804$"), (100, 0, "error 100$")],
)
def test_a_driver_that_refuses_says_so(fake_driver: Any, refuses: int, names: int, said: str) -> None:
    fake_driver(refuses, names)
    with pytest.raises(probe.NoDriver, match=f"cuInit failed with {said}"):
        probe.ask_driver({})


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LIBRARY", "libnothere.so.1")
    with pytest.raises(probe.NoDriver, match=r"libnothere\.so\.1"):
        probe.ask_driver({})


@pytest.mark.skipif(bool(probe.find(ProbeEnv(environ={})).devices), reason="this machine has a GPU")
def test_asking_for_a_gpu_by_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"accelerator='nvidia_sm100'.*no device file /dev/nvidia0"):
        LLM("demo", accelerator="nvidia_sm100")


def test_the_plugin_says_why_it_has_no_device(tmp_path: Path) -> None:
    (answer,) = plugin.deepinfer_probe(ProbeEnv(environ={}, root=str(tmp_path)))
    assert isinstance(answer, NoDevice)
    assert (answer.backend, answer.legacy_names) == ("nvidia_sm100", ("nvidia",))
    assert "no device file" in answer.reason


def test_declaring_imports_neither_torch_nor_triton() -> None:
    names = [name for name in dir(plugin) if name.startswith("deepinfer_")]
    assert {"deepinfer_probe", "deepinfer_attention", "deepinfer_gemm", "deepinfer_sampling"} <= set(names)
    script = """
import sys
from deepinfer_core.api import DeviceInfo, LazyRef, ProbeEnv
from deepinfer_nvidia_sm100 import plugin
device = DeviceInfo(backend="nvidia_sm100", type="cuda", arch="sm_90", count=1, memory=1, priority=1, evidence="",
                    provider=LazyRef("a:b"))
plugin.deepinfer_probe(ProbeEnv(environ={}))
count = 0
for name in dir(plugin):
    if name.startswith("deepinfer_") and name not in ("deepinfer_plugin", "deepinfer_probe", "deepinfer_commands"):
        count += len(getattr(plugin, name)(device))
assert count > 15, count
print("torch" in sys.modules, "triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_providers_serve_no_other_backend() -> None:
    from gpu_support import HOOKS, INFO

    other = attrs.evolve(INFO, backend="acme")
    assert [provider for hook in HOOKS for provider in hook(other)] == []


def test_a_folder_for_compiled_kernels_must_be_writable(tmp_path: Path) -> None:
    from deepinfer_nvidia_sm100.device import check_kernel_cache

    check_kernel_cache(tmp_path / "new" / "cache")
    assert (tmp_path / "new" / "cache").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match=r"cannot be kept in .*file/cache: .*set TRITON_CACHE_DIR"):
        check_kernel_cache(tmp_path / "file" / "cache")
