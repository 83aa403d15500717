"""Mistakes that only a whole model shows: between operators, in the device, in the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core.conformance.kit import all_cases, ask
from deepinfer_core.conformance.target import open_target

PLUGIN = """
import numpy as np
from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, Provider, hookimpl, yes
{imports}

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="{name}")

@hookimpl
def deepinfer_probe(env):
    return [DeviceInfo(backend="{name}", type="cpu", arch="", count=1, memory=1 << 30, priority=-5, evidence="here",
                       provider={device}, fallback="allow")]

{body}
"""

WORSE_NORM = """
class Norm:
    def __init__(self, request, context):
        self._right = context.reference(request)
    def run(self, x, weight):
        return self._right.run(x, weight) * 1.0003
    def add(self, x, residual, weight):
        y, s = self._right.add(x, residual, weight)
        return y * 1.0003, s

@hookimpl
def deepinfer_pointwise(device):
    if device.backend != "{name}":
        return []
    return [Provider(name="norm", op="pointwise.rms_norm", build=Norm, supports=lambda r: yes(50),
                     caps={{"deterministic", "spec_verify"}})]
"""

SHARED_STAGING = '''
class Device(CpuDevice):
    """Uploads through one staging buffer that the next upload of that size writes over."""
    def __init__(self, info):
        super().__init__(info)
        self._staging = {{}}
    def upload(self, array):
        import torch
        key = (array.shape, array.dtype)
        if key not in self._staging:
            self._staging[key] = torch.from_numpy(array.copy())
        staging = self._staging[key]
        staging.copy_(torch.from_numpy(array.copy()))
        return staging
'''

CPU = 'LazyRef("deepinfer_core.cpu.device:CpuDevice")'
MISTAKES = {
    "a_norm_three_parts_in_ten_thousand_off": (CPU, "", WORSE_NORM, "model[qwen3]/float32/logits", "at most"),
    "a_staging_buffer_shared_by_uploads": (
        'LazyRef("{name}:Device")',
        "from deepinfer_core.cpu.device import CpuDevice",
        SHARED_STAGING,
        "model[qwen3]/float32/greedy",
        "",
    ),
}
CASES = {case.id: case for case in all_cases("float32")}


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    mistake = request.node.callspec.params["mistake"]
    device, imports, body, _, _ = MISTAKES[mistake]
    name = f"mistaken_{mistake}"
    fields = {"device": device.format(name=name), "imports": imports, "body": body.format(name=name)}
    file = tmp_path / f"{name}.py"
    file.write_text(PLUGIN.format(name=name, **fields))
    yield name, file
    sys.modules.pop(name, None)


@pytest.mark.parametrize("mistake", sorted(MISTAKES))
def test_a_model_shows_it(mistake: str, plugin: tuple[str, Path]) -> None:
    name, file = plugin
    _, _, _, case, says = MISTAKES[mistake]
    target = open_target(name, [str(file)])
    try:
        result = ask(CASES[case], target)
    finally:
        target.close()
    assert result.outcome == "failed", result
    assert says in result.message
