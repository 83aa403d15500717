"""Finds the NPUs of this machine by device file and the driver's own query tool. Imports no torch, opens no device."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from deepinfer_core.api import DeviceInfo, LazyRef, NoDevice, ProbeEnv

from .requirements import Missing, cann, driver, torch_npu

BACKEND = "ascend950"
LEGACY_NAMES = ("ascend",)
PRIORITY = 200
CHIP = "950"
TOOL = "npu-smi"
SECONDS = 20.0

Query = Callable[[Mapping[str, str]], str]


def ask_driver(environ: Mapping[str, str]) -> str:
    """``npu-smi info -m``: one line a chip, its name last. Raises OSError when the tool is missing or fails."""
    try:
        done = subprocess.run(
            [TOOL, "info", "-m"], env=dict(environ), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{TOOL} did not answer within {SECONDS:.0f} s") from error
    if done.returncode:
        raise OSError(f"{TOOL} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def chips(answer: str) -> list[str]:
    """Names of the NPU chips in the tool's table, whose columns are separated by two spaces or more.

    The management controller of each card has a line of its own, named ``Mcu``.
    """
    names = []
    for line in answer.splitlines():
        cells = re.split(r"\s{2,}|\t+", line.strip())
        if len(cells) >= 4 and cells[0].isdigit() and cells[-1] != "Mcu":
            names.append(cells[-1])
    return names


def find(env: ProbeEnv, query: Query = ask_driver) -> DeviceInfo | NoDevice:
    """The NPUs that can be used, or the first thing that is missing. Without a device file no process is started."""
    files = sorted(path.name for path in Path(env.root, "dev").glob("davinci[0-9]*"))
    if not files:
        return _none(f"no device file {Path(env.root, 'dev', 'davinci0')}", f"check: ls /dev/davinci*; {TOOL} info")
    found = {"driver": driver(env.root), "CANN": cann(env.environ, env.root), "torch_npu": torch_npu()}
    for version in found.values():
        if isinstance(version, Missing):
            return _none(f"{', '.join(files)} found, but {version.reason}", version.fix)
    try:
        names = chips(query(env.environ))
    except OSError as error:
        return _none(f"{', '.join(files)} found, but the driver does not answer: {error}", f"check: {TOOL} info -m")
    usable = [name for name in names if CHIP in name]
    if not usable:
        seen = ", ".join(sorted(set(names))) or "no chip"
        return _none(f"{TOOL} shows {seen}; supported: Ascend {CHIP}", f"check: {TOOL} info -m")
    versions = ", ".join(f"{part} {version}" for part, version in found.items())
    return DeviceInfo(
        backend=BACKEND,
        type="npu",
        arch=usable[0],
        count=len(usable),
        memory=0,  # the query tool's table has none; the device says it when it is opened
        priority=PRIORITY,
        evidence=f"/dev/{files[0]}, {len(usable)} x {usable[0]}, {versions}",
        provider=LazyRef("deepinfer_ascend950.device:AscendDevice"),
        fallback="warn",
        legacy_names=LEGACY_NAMES,
    )


def _none(reason: str, fix: str) -> NoDevice:
    return NoDevice(backend=BACKEND, reason=reason, fix=fix, legacy_names=LEGACY_NAMES)
