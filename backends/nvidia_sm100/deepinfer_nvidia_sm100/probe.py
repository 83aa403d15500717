"""Finds the GPUs of this machine by device file and driver. Imports no torch and opens no context."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.api import DeviceInfo, LazyRef, ProbeEnv

BACKEND = "nvidia_sm100"
LEGACY_NAMES = ("nvidia",)
PRIORITY = 200
CAPABILITIES = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities that the kernels are compiled for in the tests."""
LIBRARY = "libcuda.so.1"
SECONDS = 30.0

Query = Callable[[Mapping[str, str]], Mapping[str, Any]]


class NoDriver(Exception):
    """The driver is missing or refuses; the text says why."""


@attrs.frozen
class Findings:
    """What the probe saw: the devices that can be used, and why there is none, or not every one."""

    devices: Sequence[DeviceInfo]
    reason: str


def ask_driver(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The answer of :mod:`.driver_query`, run as a script in a child process.

    Raises:
        NoDriver: the library cannot be loaded, or fails.
    """
    script = Path(__file__).with_name("driver_query.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(script), LIBRARY],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoDriver(f"the driver could not be asked: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NoDriver(last)
    answer: Mapping[str, Any] = json.loads(done.stdout)
    return answer


def find(env: ProbeEnv, query: Query = ask_driver) -> Findings:
    """Usable devices, best first by their own numbering. A machine without a device file starts no process."""
    files = sorted(path.name for path in Path(env.root, "dev").glob("nvidia[0-9]*"))
    if not files:
        return Findings((), f"no device file {Path(env.root, 'dev', 'nvidia0')}")
    chosen = env.environ.get("CUDA_VISIBLE_DEVICES")
    visible = "" if chosen is None else f"; CUDA_VISIBLE_DEVICES is {chosen!r}"
    try:
        answer = query(env.environ)
    except NoDriver as error:
        return Findings((), f"{', '.join(files)} found, but no working driver: {error}{visible}")
    kinds: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for device in answer["devices"]:
        kinds.setdefault((device["name"], device["major"], device["minor"]), []).append(device)
    devices, others = [], []
    for (name, major, minor), same in kinds.items():
        if (major, minor) in CAPABILITIES:
            devices.append(_info(name, major, minor, same, int(answer["driver"]), files))
        else:
            others.append(f"{name} has compute capability {major}.{minor}")
    known = ", ".join(f"{a}.{b}" for a, b in CAPABILITIES)
    none = f"the driver shows no device{visible}" if not kinds else ""
    return Findings(tuple(devices), f"{'; '.join(others)}; supported: {known}{visible}" if others else none)


def _info(
    name: str, major: int, minor: int, same: Sequence[Mapping[str, Any]], driver: int, files: Sequence[str]
) -> DeviceInfo:
    version = f"{driver // 1000}.{driver % 1000 // 10}"
    return DeviceInfo(
        backend=BACKEND,
        type="cuda",
        arch=f"sm_{major}{minor}",
        count=len(same),
        memory=int(same[0]["memory"]),
        priority=PRIORITY,
        evidence=(
            f"/dev/{files[0]}, {name}, compute capability {major}.{minor}, "
            f"{same[0]['multiprocessors']} multiprocessors, driver for CUDA {version}"
        ),
        provider=LazyRef("deepinfer_nvidia_sm100.device:CudaDevice"),
        fallback="warn",
        legacy_names=LEGACY_NAMES,
    )
