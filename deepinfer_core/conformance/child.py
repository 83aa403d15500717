"""What a child process finds out about a plugin: ``python -m deepinfer_core.conformance.child`` with JSON on stdin.

The child is fresh, so that what the plugin imports, opens and loads can be told from what was there already.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepinfer_core.api import Choice, DeviceInfo, EnginePlan, LazyRef, ProbeEnv, RmsNormRequest
from deepinfer_core.plugins import Registry, load_planned, load_plugins, plan_from_json, plan_to_json, request_to_data

HEAVY = ("torch", "transformers", "tensorflow", "jax")
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/tty", "/dev/shm")


def main() -> None:
    """Read a question, write the facts."""
    question = json.load(sys.stdin)
    json.dump(_facts(question["plugin"], question["backend"], question["files"]), sys.stdout)


def _facts(plugin: str, backend: str, files: Sequence[str]) -> dict[str, Any]:
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching or not arguments:
            return
        name = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        device = event == "open" and name.startswith("/dev/") and not name.startswith(_HARMLESS)
        if device or (event == "ctypes.dlopen" and name):
            opened.append(name)

    sys.addaudithook(watch)
    registry = load_plugins(files=files)
    here = _device(registry, backend)
    first = _declared(registry, here)
    watching = False
    heavy = [name for name in HEAVY if name in sys.modules]
    again = load_plugins(files=files)
    facts: dict[str, Any] = {
        "heavy": heavy,
        "opened": opened,
        "records": [[r.name, r.distribution, r.version, r.entry_point] for r in registry.records],
        "again": [[r.name, r.distribution, r.version, r.entry_point] for r in again.records],
        "declared": first,
        "declared_again": _declared(again, _device(again, backend)),
        "failures": [str(f) for f in registry.failures if f.name == plugin],
    }
    facts.update(_round_trip(registry, here, plugin))
    return facts


def _device(registry: Registry, backend: str) -> DeviceInfo:
    """The backend's device, or, where it is not in this machine, one that only names it."""
    for _, info in registry.collect("deepinfer_probe", env=ProbeEnv(environ=dict(os.environ))):
        if isinstance(info, DeviceInfo) and info.backend == backend:
            return info
    return DeviceInfo(
        backend=backend,
        type=backend,
        arch="",
        count=1,
        memory=0,
        priority=0,
        evidence="not in this machine",
        provider=LazyRef(f"{__name__}:DeviceInfo"),
    )


def _declared(registry: Registry, device: DeviceInfo) -> list[list[Any]]:
    """Every provider as plain data."""
    return [[plugin, p.op, p.name, sorted(p.caps), p.fallback] for plugin, p in registry.providers(device)]


def _round_trip(registry: Registry, device: DeviceInfo, plugin: str) -> dict[str, Any]:
    """A plan with this device, as JSON and back, here and in a spawned process that loads what it names."""
    request = RmsNormRequest(hidden=64, eps=1e-6, dtype="float32", device_type=device.type)
    choice = Choice(
        slot="norm",
        op=request.op,
        request=request_to_data(request),
        provider="reference:rms_norm",
        score=0,
        reason="",
        source="reference",
    )
    plan = EnginePlan(
        api=(1, 0),
        core="",
        accelerator=device.backend,
        device={"backend": device.backend, "type": device.type, "arch": device.arch, "memory": device.memory},
        plugins=registry.records,
        choices=(choice,),
        policy="engine:fcfs",
    )
    text = plan_to_json(plan)
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_worker, args=(text, send))
    worker.start()
    send.close()
    try:
        spawned = receive.recv() if receive.poll(120) else "no answer within 120 s"
    except EOFError:
        spawned = "the process ended without an answer"
    worker.join(10)
    return {"same_plan": plan_to_json(plan_from_json(text)) == text, "spawned": spawned}


def _worker(text: str, send: Any) -> None:
    try:
        plan = plan_from_json(text)
        loaded = load_planned(plan)
        send.send("" if loaded.records == plan.plugins else "other plugins were loaded than the plan names")
    except BaseException as error:
        send.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
