"""In a child: start one backend. Import torch, open the device, import its operators, make a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from deepinfer_core import api
from deepinfer_core.api import Device, DeviceInfo, LazyRef, OpRequest
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.config import load_config, override
from deepinfer_core.engine.planning import make_plan, open_registry, pick_device
from deepinfer_core.plugins import Registry

from .child import Say
from .tiny import write_tiny

CAPS = ("deterministic", "batch_invariant", "spec_verify", "device_state", "graph_capture")
"""What this core asks for by name; others have a prefix (``kv_layout:``, ``extra:``)."""


def start(question: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Facts about the backend ``backend``: ``problems`` is a list of (check, cause), in the order they were met.

    A device that cannot be opened ends the examination; an operator that cannot be imported does not.
    """
    problems: list[tuple[str, str]] = []
    facts: dict[str, Any] = {
        "problems": problems,
        "torch": torch.__version__,
        "plan": "",
        "reference": [],
        "misspelt": [],
    }

    def attempt(check: str, action: Any, *arguments: Any) -> Any:
        say(check)
        try:
            return action(*arguments)
        except BaseException as error:  # SystemExit included
            problems.append((check, f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")))
            return None

    config = override(load_config(file=question["file"]), {"accelerator": question["backend"]}, source="doctor")
    registry = attempt("plugins", open_registry, config)
    chosen = registry and attempt("device", pick_device, config, registry)
    device: Device | None = chosen and attempt("device", chosen.open)
    if device is None or attempt("torch build", _allocate, device) is None:
        return facts
    facts["memory"] = attempt("memory", lambda: [device.memory().free, device.memory().total])
    attempt("stream", _run_one, device)
    for label, cause in attempt("operators", _broken_operators, registry, chosen.device, chosen.plugin) or ():
        problems.append(("operators", f"{label}: {cause}"))
    facts["misspelt"] = attempt("operators", _misspelt, registry, chosen.device, chosen.plugin) or []
    with tempfile.TemporaryDirectory() as folder, open_checkpoint(write_tiny(Path(folder))) as checkpoint:
        planned = attempt("plan", make_plan, config, checkpoint)
    if planned is not None:
        choices = planned.plan.choices
        facts["reference"] = sorted({choice.op for choice in choices if choice.source == "reference"})
        own = sum(choice.source != "reference" for choice in choices)
        facts["plan"] = f"{own} of {len(choices)} operators of its own, loop {planned.plan.facts['loop']}"
    return facts


def _allocate(device: Device) -> bool:
    """Whether this build of torch can use the device at all."""
    return bool(torch.zeros(2, device=device.torch_device).add_(1).sum().item() == 2)


def _run_one(device: Device) -> None:
    stream = device.stream(overlap=False)
    try:
        if stream.submit(lambda: 7).wait() != 7:
            raise RuntimeError("a closure's event did not give back what the closure returned")
    finally:
        stream.close()


def _misspelt(registry: Registry, info: DeviceInfo, plugin: str) -> list[str]:
    """Operators and caps of the plugin that are almost one of this core's: nothing ever asks for them.

    Names that resemble nothing are let through: another plugin's models, or a newer core, may ask for those.
    """
    operators = {kind.op for kind in vars(api).values() if isinstance(kind, type) and issubclass(kind, OpRequest)}
    found = []
    for owner, provider in registry.providers(info):
        named = [("op", provider.op, operators), *(("cap", cap, CAPS) for cap in sorted(provider.caps))]
        for what, name, known in named if owner == plugin else ():
            near = [] if name in known else get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                found.append(f"{owner}:{provider.name} has {what} {name!r}, which nothing asks for: write {near[0]!r}")
    return found


def _broken_operators(registry: Registry, info: DeviceInfo, plugin: str) -> list[tuple[str, str]]:
    """Providers of the plugin whose operator cannot be imported, with the cause."""
    broken = []
    for owner, provider in registry.providers(info):
        if owner != plugin or not isinstance(provider.build, LazyRef):
            continue
        try:
            provider.build.load()
        except BaseException as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            broken.append((f"{owner}:{provider.name} ({provider.build.target})", text))
    return broken
