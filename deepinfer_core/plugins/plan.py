"""The engine plan as JSON, and the check a worker makes before it builds from one."""

from __future__ import annotations

import json

from cattrs.preconf.json import make_converter

from deepinfer_core import __version__
from deepinfer_core.api import API_VERSION, EnginePlan, PlanError, PluginError

from .registry import Registry

_converter = make_converter(forbid_extra_keys=True)


def plan_to_json(plan: EnginePlan) -> str:
    """Deterministic JSON: equal plans give equal text, and :func:`plan_from_json` gives the plan back.

    Raises:
        PlanError: ``device``, ``facts`` or a request holds something that is not plain data.
    """
    try:
        return json.dumps(_converter.unstructure(plan), sort_keys=True, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(f"the plan holds something that is not plain data: {error}") from error


def plan_from_json(text: str) -> EnginePlan:
    """Raises PlanError when the text is not a plan of this interface's form."""
    try:
        return _converter.structure(json.loads(text), EnginePlan)
    except Exception as error:
        raise PlanError(f"not an engine plan: {type(error).__name__}: {error}") from error


def verify_plan(plan: EnginePlan, registry: Registry) -> None:
    """Check that this process has exactly the core and the plugins the plan was made with.

    Raises:
        PluginError: naming what differs, what the plan says and what is here.
    """
    if plan.api != API_VERSION or plan.core != __version__:
        raise PluginError(
            f"the plan was made by core {plan.core} with interface {plan.api}; "
            f"this process has core {__version__} with interface {API_VERSION}"
        )
    here = {record.name: record for record in registry.records}
    for record in plan.plugins:
        found = here.pop(record.name, None)
        if found != record:
            had = f"{found.distribution} {found.version} ({found.entry_point})" if found else "none"
            raise PluginError(
                f"plugin {record.name!r}: the plan was made with {record.distribution} {record.version} "
                f"({record.entry_point}), this process has {had}"
            )
    if here:
        raise PluginError(f"plugins loaded here but not in the plan: {', '.join(sorted(here))}")
