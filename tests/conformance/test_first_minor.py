"""What was written against the first minor of the interface runs on this core, and on one with a newer minor.

``first_minor/api`` is the interface as it was then, frozen: never edited, only compared with.
"""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from deepinfer_core import api
from deepinfer_core.api import API_VERSION, hookspecs
from deepinfer_core.conformance import run
from deepinfer_core.conformance.api_minors import ADDED, added_in
from deepinfer_core.conformance.case import Refused
from deepinfer_core.conformance.operators import steps
from deepinfer_core.conformance.sources import hooks, imports, plugin_sources
from deepinfer_core.conformance.target import open_target
from deepinfer_core.plugins import inspection, load_plugins

HERE = Path(__file__).parent
FROZEN = HERE / "first_minor" / "api"

PROVISIONAL = {"Draft", "DraftRow", "Drafter", "DrafterInfo", "Verified"}
"""Outside the promise until two plugins use them (docs/compatibility.md)."""

ONLY_RECEIVED = {
    "BuildContext",
    "DispatchedRows",
    "EnginePlan",
    "ModelBatch",
    "ModelContext",
    "ModelOptions",
    "ProbeEnv",
    "RequestArrays",
    "RequestView",
    "SamplingBatch",
    "SamplingState",
    "SchedulingEvent",
    "StepLayout",
    "SystemView",
}
"""Records that plugins receive and do not make, besides the requests: new fields need no default."""


def _load_frozen() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "first_minor_api", FROZEN / "__init__.py", submodule_search_locations=[str(FROZEN)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_minor_api"] = module
    spec.loader.exec_module(module)
    return module


THEN = _load_frozen()
NAMES = sorted(set(THEN.__all__) - PROVISIONAL)


def test_the_frozen_copy_is_the_first_minor() -> None:
    assert THEN.API_VERSION == (1, 0)
    assert API_VERSION[0] == 1
    assert API_VERSION >= THEN.API_VERSION


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_first_minor_means_what_it_meant(name: str) -> None:
    then, now = getattr(THEN, name), getattr(api, name)
    if name == "API_VERSION":
        return
    if not isinstance(then, type):
        if inspect.isfunction(then):
            assert list(inspect.signature(then).parameters) == list(inspect.signature(now).parameters)
        elif isinstance(then, str | int | float | tuple):
            assert then == now
        return
    assert {base.__name__ for base in then.__mro__} <= {base.__name__ for base in now.__mro__}
    if attrs.has(then):
        _check_fields(name, then, now)
    _check_methods(name, then, now)


def _check_fields(name: str, then: Any, now: Any) -> None:
    old, new = ({f.name: f for f in attrs.fields(kind)} for kind in (then, now))
    assert set(old) <= set(new), "a field is gone"
    # Not ``field.type``: reading a record from JSON resolves those strings in place.
    assert _annotations(then).items() <= _annotations(now).items(), "a field changed its type"
    for key, field in old.items():
        assert new[key].kw_only == field.kw_only, key
        assert (new[key].default is attrs.NOTHING) <= (field.default is attrs.NOTHING), f"{key} lost its default"
    received = name in ONLY_RECEIVED or (issubclass(now, api.OpRequest))
    for key in set(new) - set(old):
        assert received or new[key].default is not attrs.NOTHING, f"new field {key} has no default"


def _annotations(kind: type) -> dict[str, str]:
    return {key: str(value) for base in kind.__mro__ for key, value in inspect.get_annotations(base).items()}


def _check_methods(name: str, then: Any, now: Any) -> None:
    for key, member in vars(then).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if key.startswith("_") or not inspect.isfunction(function):
            continue
        assert key in vars(now), f"{name}.{key} is gone"
        other = vars(now)[key]
        other = other.fget if isinstance(other, property) else getattr(other, "__func__", other)
        old, new = inspect.signature(function).parameters, inspect.signature(other).parameters
        assert list(old) == [key for key in new if key in old], f"{name}.{key} takes other arguments"
        for extra in set(new) - set(old):
            assert new[extra].default is not inspect.Parameter.empty, f"{name}.{key}: new argument {extra}"
    if getattr(then, "_is_protocol", False):
        required = {k for k, v in vars(now).items() if inspect.isfunction(v) and not k.startswith("_")}
        assert required <= set(vars(then)), "a protocol that plugins implement asks for more"


@pytest.mark.parametrize(
    "hook", sorted(name for name in vars(THEN.hookspecs) if name.startswith("deepinfer_") and "speculation" not in name)
)
def test_a_hook_of_the_first_minor_keeps_its_arguments(hook: str) -> None:
    then, now = getattr(THEN.hookspecs, hook), getattr(hookspecs, hook)
    assert set(inspect.signature(then).parameters) <= set(inspect.signature(now).parameters)


def test_every_name_and_hook_that_came_later_is_known_to_have() -> None:
    """So that the kit can tell a plugin which minor it needs."""
    then, now = ({*m.__all__, *(n for n in vars(m.hookspecs) if n.startswith("deepinfer_"))} for m in (THEN, api))
    later = set().union(*ADDED.values())
    assert later == now - then, "deepinfer_core.conformance.api_minors: name what a minor added, and raise API_VERSION"
    assert max(ADDED) == API_VERSION


@pytest.mark.parametrize("name", sorted(load_plugins().plugins))
def test_a_plugin_of_this_repository_declares_the_minor_it_needs(name: str) -> None:
    loaded = load_plugins().plugins[name]
    needed = {(1, 0)}
    for source in plugin_sources(loaded.record.entry_point):
        needed |= {
            added_in(full.split(".")[2]) for _, full in imports(source) if full.startswith("deepinfer_core.api.")
        }
        needed |= {added_in(hook) for _, hook in hooks(source)}
    assert loaded.info.api == max(needed)


UNDER_THE_FROZEN_COPY = """
import importlib.util, sys
frozen, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("deepinfer_core.api", frozen + "/__init__.py",
                                              submodule_search_locations=[frozen])
api = sys.modules["deepinfer_core.api"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api)
sys.path.insert(0, folder)
from first_minor import backend
from deepinfer_core.api import ProbeEnv, RmsNormRequest
assert api.__file__.startswith(frozen)
(device,) = backend.deepinfer_probe(ProbeEnv(environ={}))
hooks = (backend.deepinfer_pointwise, backend.deepinfer_gemm, backend.deepinfer_attention, backend.deepinfer_sampling)
offered = [provider for hook in hooks for provider in hook(device)]
assert offered[0].supports(RmsNormRequest(hidden=8, eps=1e-6, dtype="float32")).score == 50
print(backend.deepinfer_plugin().api, len(offered), "torch" in sys.modules)
"""


def test_the_backend_needs_nothing_newer_than_the_first_minor() -> None:
    found = subprocess.run(
        [sys.executable, "-c", UNDER_THE_FROZEN_COPY, str(FROZEN), str(HERE)], capture_output=True, text=True
    )
    assert found.stdout.split("\n")[0] == "(1, 0) 5 False", found.stderr


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(HERE))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "first_minor"]:
        del sys.modules[name]


OWN = {"pointwise.rms_norm": "first:norm", "gemm.linear": "first:linear", "attention.paged": "first:paged"}


@pytest.mark.usefixtures("_importable")
def test_the_backend_boots_on_this_core() -> None:
    report = run("first", tier="boots", plugins=["first_minor.backend"])
    failed = {r.case: r.message for r in report.results if r.outcome == "failed"}
    assert failed == {}
    own = {r.operator: r.message for r in report.results if r.case.endswith("/one_row") or r.case.endswith("/decode")}
    assert OWN.items() <= own.items()


@attrs.define(kw_only=True)
class LaterLayout(api.StepLayout):
    """A record that plugins receive, with a field that a later minor added."""

    later: int


@pytest.mark.usefixtures("_importable")
def test_the_backend_boots_on_a_core_of_the_next_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "API_VERSION", (1, API_VERSION[1] + 1))
    monkeypatch.setattr(steps, "StepLayout", partial(LaterLayout, later=1))
    families = ["pointwise", "gemm", "attention", "sampling", "model"]
    report = run("first", tier="boots", plugins=["first_minor.backend"], families=families)
    assert {r.case: r.message for r in report.results if r.outcome == "failed"} == {}


@pytest.mark.usefixtures("_importable")
def test_a_new_demand_is_refused_without_a_line_of_code() -> None:
    target = open_target("first", ["first_minor.backend"])
    try:
        asked = api.RmsNormRequest(hidden=64, eps=1e-6, dtype="float32")
        assert target.choose(asked).label == "first:norm"
        with pytest.raises(Refused, match="lacks: later_demand"):
            target.choose(attrs.evolve(asked, demands={"later_demand"}))
    finally:
        target.close()
