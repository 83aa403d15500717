"""The backends of this repository under the kit: tier *boots* in every run of the tests, the rest in the full ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from deepinfer_core.api import ConfigError, PlanError
from deepinfer_core.conformance import Report, run

FAKE = Path(__file__).parents[1] / "fake_backend"
BACKENDS = {"reference": (), "cpu": (), "fake": ("deepinfer_fake.plugin",)}
"""Name -> plugins that are not installed."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepinfer_fake"]:
        del sys.modules[name]


def failures(report: Report) -> dict[str, str]:
    return {result.case: result.message for result in report.results if result.outcome == "failed"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_boots(backend: str) -> None:
    report = run(backend, tier="boots", plugins=BACKENDS[backend])
    assert failures(report) == {}
    assert report.passed
    assert report.counts()["refused"] == 0
    assert report.counts()["passed"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything(backend: str) -> None:
    report = run(backend, tier="full", plugins=BACKENDS[backend])
    assert failures(report) == {}
    assert report.counts()["passed"] > 400


def test_own_operators_are_what_is_asked() -> None:
    """The host's verdict is about its own operators, not about the reference standing in."""
    report = run("cpu", tier="boots", families=["gemm.linear", "attention.paged"])
    by = {result.message.partition(" ")[0] for result in report.results if result.outcome == "passed"}
    assert by == {"cpu:packed_linear", "cpu:paged_in_place"}


def test_a_provider_that_is_not_chosen_can_be_asked() -> None:
    """The 8-bit product is there on request: it rounds weights, and the kit says by how much that is too far."""
    report = run("cpu", families=["gemm.linear"], providers=["cpu:int8_weight_only"])
    failed = failures(report)
    assert "cpu:int8_weight_only" in failed["gemm.linear/float32/odd_rows"]
    with pytest.raises(PlanError, match="int8_weight_only"):
        run("cpu", families=["gemm.linear"], providers=["cpu:int8_weight_onyl"])


PLUGINS = Path(__file__).parents[2] / "plugins"


def test_a_demand_asks_those_that_meet_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that are there for one demand alone are proved under it."""
    monkeypatch.syspath_prepend(str(PLUGINS / "batch_invariance"))
    families = ["gemm.linear", "pointwise.rms_norm", "attention.paged"]
    plugins = [] if _is_installed("deepinfer-batch-invariance") else ["deepinfer_batch_invariance.plugin"]
    report = run("cpu", families=families, plugins=plugins, demands=["batch_invariant"])
    assert failures(report) == {}
    proved = [result for result in report.results if result.case.endswith("/batch_invariant")]
    assert len(proved) >= 4
    assert {result.outcome for result in proved} == {"passed"}
    assert {result.message.partition(":")[0] for result in proved} == {"batch_invariance"}


def test_a_demand_that_nobody_meets_is_an_error_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match=r"^--demand 'batch_invarant': no provider has this cap; "):
        run("cpu", families=["gemm.linear"], demands=["batch_invarant"])


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


HALF = """
from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, hookimpl

def open_device(info):
    from deepinfer_core.cpu.device import CpuDevice
    device = CpuDevice(info)
    device.default_dtype = lambda stored: "{dtype}"
    return device

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="half_{dtype}")

@hookimpl
def deepinfer_probe(env):
    return [DeviceInfo(backend="half_{dtype}", type="cpu", arch="", count=1, memory=1 << 30, priority=-5,
                       evidence="here", provider=LazyRef("half_{dtype}:open_device"), fallback="allow")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_operators_pass_in_every_dtype(dtype: str, tmp_path: Path) -> None:
    """A backend that computes in 16 bits, by the reference operators: no bound is too tight for it."""
    file = tmp_path / f"half_{dtype}.py"
    file.write_text(HALF.format(dtype=dtype))
    report = run(f"half_{dtype}", tier="full", plugins=[str(file)])
    assert set(failures(report)) == {"hygiene/imports_interface_only"}
    assert any(result.case == f"model[deepseek_v4]/{dtype}/greedy" for result in report.results)
    del sys.modules[f"half_{dtype}"]
