"""A new backend: a device, and one operator of each family, delegating to the reference."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from deepinfer_core.api import ConfigError

from .names import check_directory, check_name
from .render import render, render_folder, write

HOST = "cpu"
_CAPS = ("deterministic", "spec_verify")


@attrs.frozen(kw_only=True)
class Family:
    """One family's file.

    Attributes:
        name: of the file and of the list in ``plugin.py``. hook: that returns the list.
        op, provider: of the one operator. protocol, request: its contract's names in ``deepinfer_core.api``.
        about: first line of the file. caps: that the reference has. caps_name: their name in ``plugin.py``.
    """

    name: str
    op: str
    provider: str
    protocol: str
    request: str
    about: str
    more_caps: tuple[str, ...] = ()
    caps_name: str = "CAPS"
    supports: str = "supports"

    @property
    def hook(self) -> str:
        return f"deepinfer_{'moe_communication' if self.name == 'moe' else self.name}"

    @property
    def caps(self) -> tuple[str, ...]:
        return tuple(sorted((*_CAPS, *self.more_caps)))

    @property
    def imports(self) -> str:
        return ", ".join(sorted(("BuildContext", self.protocol, self.request)))

    @property
    def call(self) -> str:
        """How ``plugin.py`` declares it."""
        extra = [self.caps_name] if self.caps_name != "CAPS" or self.supports != "supports" else []
        extra += [self.supports] if self.supports != "supports" else []
        arguments = [f'"{self.provider}"', f'"{self.op}"', f'"{self.name}:{self.function}"', *extra]
        return f"provider({', '.join(arguments)})"

    @property
    def function(self) -> str:
        return "layout" if self.name == "kv_layout" else self.provider


FAMILIES = (
    Family(
        name="attention",
        op="attention.paged",
        provider="paged_attention",
        protocol="PagedAttention",
        request="PagedAttentionRequest",
        about="Attention over the paged cache: ``attention.paged``.",
        more_caps=("kv_layout:paged",),
        caps_name="KV_CAPS",
    ),
    Family(
        name="gemm",
        op="gemm.linear",
        provider="linear",
        protocol="Linear",
        request="LinearRequest",
        about="Linear layers: ``gemm.linear``.",
    ),
    Family(
        name="kv_layout",
        op="kv_layout.paged",
        provider="paged",  # a layout's name is what attention declares as kv_layout:<name>
        protocol="KVLayout",
        request="KVLayoutRequest",
        about="How cache blocks lie in memory: ``kv_layout.paged``.",
    ),
    Family(
        name="moe",
        op="moe.route",
        provider="route",
        protocol="Route",
        request="RouteRequest",
        about="Which experts a token goes to: ``moe.route``.",
    ),
    Family(
        name="pointwise",
        op="pointwise.rms_norm",
        provider="rms_norm",
        protocol="RmsNorm",
        request="RmsNormRequest",
        about="Norms, rotary embedding, activations: ``pointwise.rms_norm``.",
    ),
    Family(
        name="runner_ops",
        op="runner.input_ids",
        provider="input_ids",
        protocol="InputIds",
        request="InputIdsRequest",
        about="Gathers around the model: ``runner.input_ids``.",
        more_caps=("device_state",),
        caps_name="STATE_CAPS",
    ),
    Family(
        name="sampling",
        op="sampling.stage",
        provider="draw",
        protocol="Draw",
        request="SamplingRequest",
        about="Stages of sampling: ``draw``, the last one.",
        more_caps=("device_state",),
        caps_name="STATE_CAPS",
        supports="supports_draw",
    ),
)


def new_backend(name: str, *, directory: str | Path | None = None, device_type: str = HOST) -> list[Path]:
    """Write the project of a backend.

    Args:
        name: of plugin, backend and package; see :func:`deepinfer_core.scaffold.names.check_name`.
        directory: a new one; None: the distribution's name, here.
        device_type: torch device type of its tensors; ``cpu``: the host stands in for the device.

    Returns:
        The files, in the order they were written.

    Raises:
        ConfigError: a name, device type or directory that cannot be used.
    """
    project = check_name(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", device_type):
        raise ConfigError(f"--device-type {device_type!r}: expected a torch device type, such as 'cpu' or {name!r}")
    target = check_directory(project, directory)
    values = {
        **project.values(),
        "families": FAMILIES,
        "host": device_type == HOST,
        "device_type": device_type,
        "device_files": f"{name}[0-9]*",
    }
    files = render_folder("backend", values)
    for family in FAMILIES:
        files[f"{project.package}/{family.name}.py"] = render("family/family.py.j2", {**values, "family": family})
    return write(target, files)
