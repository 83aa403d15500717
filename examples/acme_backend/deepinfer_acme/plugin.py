"""What the backend declares. Imports no torch and opens no device."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from deepinfer_core.api import (
    DeviceInfo,
    LazyRef,
    PluginInfo,
    ProbeEnv,
    Provider,
    RmsNormRequest,
    Supports,
    hookimpl,
    no,
    yes,
)

BACKEND = "acme"


@hookimpl
def deepinfer_plugin() -> PluginInfo:
    return PluginInfo(name="acme", help="Acme accelerators (an example)")


@hookimpl
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo]:
    """A real backend looks at device files below ``env.root``. This device is the host, so it is always there."""
    return [
        DeviceInfo(
            backend=BACKEND,
            type="cpu",  # the torch device type: a real backend's own, such as one registered as PrivateUse1
            arch=platform.machine(),
            count=1,
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            priority=-1,  # below the host's 0, so that nobody gets it unasked; accelerators use 100 and more
            evidence="the host, under another name",
            provider=LazyRef("deepinfer_acme.device:AcmeDevice"),
            fallback="allow",  # the reference operators run everything that is not replaced
        )
    ]


def supports_norm(request: RmsNormRequest) -> Supports:
    if request.dtype != "float32":
        return no(f"dtype {request.dtype}: only float32 was tested")
    return yes(200)  # the host's own operator, which serves this device too, says 100


@hookimpl
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:
    if device.backend != BACKEND:
        return []
    return [
        Provider(
            name="fused_norm",
            op="pointwise.rms_norm",
            build=LazyRef("deepinfer_acme.norm:FusedNorm"),
            supports=supports_norm,
            caps=frozenset({"deterministic", "spec_verify"}),
        )
    ]
