"""The real probe over a directory that looks like a machine: ``ASCEND_TEST_ROOT``."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_ascend950.probe import find

from deepinfer_core.api import DeviceInfo, NoDevice, PluginInfo, ProbeEnv, hookimpl


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="rooted", help="Ascend 950 below another root")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo | NoDevice]:
    return [find(ProbeEnv(environ=env.environ, root=env.environ["ASCEND_TEST_ROOT"]))]
