"""Declares the host processor and its providers. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from deepinfer_core.api import DeviceInfo, LazyRef, PluginInfo, ProbeEnv, hookimpl


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="cpu", help="The host processor")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    return [
        DeviceInfo(
            backend="cpu",
            type="cpu",
            arch=platform.machine(),
            count=1,
            memory=_total_memory(env.root),
            priority=0,
            evidence=f"{_model_name(env.root)}, {len(os.sched_getaffinity(0))} usable cores",
            provider=LazyRef("deepinfer_core.cpu.device:CpuDevice"),
            fallback="allow",
            legacy_names=(),
        )
    ]


def _total_memory(root: str) -> int:
    for line in _lines(root, "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _model_name(root: str) -> str:
    for line in _lines(root, "proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _lines(root: str, name: str) -> list[str]:
    try:
        return (Path(root) / name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
