"""Plugins with bad manners: each fails the hygiene case that was written for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core.api import DeviceError
from deepinfer_core.conformance import run

GOOD = """
from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, hookimpl

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="{name}")

@hookimpl
def deepinfer_probe(env):
    return [DeviceInfo(backend="{name}", type="cpu", arch="", count=1, memory=1 << 30, priority=-5, evidence="here",
                       provider=LazyRef("deepinfer_core.cpu.device:CpuDevice"), fallback="allow")]
"""

MANNERS = {
    "imports_torch": ("import torch", "import_loads_no_torch", "imported torch"),
    "opens_a_device": (
        "open('/dev/fuse-or-not') if False else __import__('os').open('/dev/stdin', 0)",
        "import_opens_no_device",
        "/dev/stdin",
    ),
    "answers_otherwise_each_time": (
        "import itertools\nfrom deepinfer_core.api import Provider\ncount = itertools.count()\n"
        "@hookimpl\ndef deepinfer_gemm(device):\n"
        "    return [Provider(name=f'linear{next(count)}', op='gemm.linear', build=LazyRef('a:b'))]",
        "loads_twice",
        "answer otherwise",
    ),
    "imports_the_engine": ("from deepinfer_core.engine.request import Request", "imports_interface_only", "engine"),
    "patches_the_core": (
        "import deepinfer_core.api as core\ndef later():\n    core.yes = None",
        "patches_nothing",
        "core.yes = None",
    ),
    "patches_torch_by_its_namespace": (
        "def later():\n    import torch\n    vars(torch)['mm'] = None",
        "patches_nothing",
        "vars(torch)",
    ),
    "patches_through_another_name": (
        "def later():\n    import torch\n    t = torch\n    setattr(t.Tensor, 'relu', None)",
        "patches_nothing",
        "setattr",
    ),
    "wants_what_is_not_there": (
        "from deepinfer_core.api import *\ndef f():\n    from deepinfer_core.api import Warp",
        "api_range",
        "Warp",
    ),
    "says_that_an_older_interface_is_enough": (
        "from deepinfer_core.api import Region",
        "api_range",
        "imports Region, which came with interface 1.1",
    ),
    "implements_a_newer_hook_unasked": (
        "@hookimpl\ndef deepinfer_constraints():\n    return []",
        "api_range",
        "implements deepinfer_constraints without optionalhook",
    ),
    "does_not_load_in_a_worker": (
        "import multiprocessing\nif multiprocessing.parent_process() is not None:\n    raise OSError('busy')",
        "loads_under_spawn",
        "busy",
    ),
}


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    name = f"sick_{request.node.callspec.params['manner']}"
    file = tmp_path / f"{name}.py"
    file.write_text(GOOD.format(name=name) + MANNERS[request.node.callspec.params["manner"]][0] + "\n")
    yield name, file
    sys.modules.pop(name, None)


@pytest.mark.parametrize("manner", sorted(MANNERS))
def test_bad_manners_fail_their_case(manner: str, plugin: tuple[str, Path]) -> None:
    name, file = plugin
    _, case, says = MANNERS[manner]
    report = run(name, families=["hygiene"], plugins=[str(file)])
    failed = {result.case: result.message for result in report.results if result.outcome == "failed"}
    assert says in failed[f"hygiene/{case}"], failed


def test_hygiene_needs_no_device(tmp_path: Path) -> None:
    file = tmp_path / "far_away.py"
    source = GOOD.format(name="far_away").replace("return [DeviceInfo(", "return [] or [] if env else [DeviceInfo(")
    file.write_text(source)
    report = run("far_away", families=["hygiene"], plugins=[str(file)])
    assert report.passed, [result for result in report.results if result.outcome == "failed"]
    assert "not in this machine" in report.device["device"]
    with pytest.raises(DeviceError):
        run("far_away", plugins=[str(file)])
    sys.modules.pop("far_away", None)


def test_good_manners_pass(tmp_path: Path) -> None:
    file = tmp_path / "well_mannered.py"
    file.write_text(GOOD.format(name="well_mannered"))
    report = run("well_mannered", families=["hygiene"], plugins=[str(file)])
    assert report.passed, [result for result in report.results if result.outcome == "failed"]
