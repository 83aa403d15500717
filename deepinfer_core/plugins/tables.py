"""Operator tables: one attribute per slot, built once, fixed afterwards.

A step reads ``table.slot`` and calls it: no lookup by name, no hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from deepinfer_core import api
from deepinfer_core.api import BuildContext, Choice, LazyRef, OpRequest, PlanError, Provider, SamplingRequest

from .choice import check_slot
from .failure import cause_line
from .requests import request_from_data

WrapOp = Callable[[Choice, Any], Any]
"""``(choice, operator)`` -> something with the operator's methods."""


class OpTable:
    """Base of all tables; each has slots of its own. Reading an unknown slot is an AttributeError that lists them."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"operator tables are frozen; cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"operator tables are frozen; cannot delete {name!r}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no slot {name!r}; slots: {', '.join(type(self).__slots__)}")


def freeze(
    choices: Iterable[Choice],
    providers: Sequence[tuple[str, Provider]],
    context_for: Callable[[str], BuildContext],
    wrap: WrapOp | None = None,
) -> OpTable:
    """Build each chosen operator once and put it into a table.

    Args:
        choices: of a plan, in slot order.
        providers: ``(plugin, provider)`` as collected in this process.
        context_for: plugin name -> what its providers get to build with.
        wrap: gives what stands in the table for an operator, for measurements.

    Raises:
        PlanError: a chosen provider is not loaded here, or fails to build what its contract says.
    """
    by_label = {(provider.op, f"{plugin}:{provider.name}"): (plugin, provider) for plugin, provider in providers}
    built: dict[str, Any] = {}
    for choice in choices:
        check_slot(choice.slot)
        if choice.slot in built:
            raise PlanError(f"slot {choice.slot!r} is chosen twice")
        if (choice.op, choice.provider) not in by_label:
            raise PlanError(f"slot {choice.slot!r}: {choice.provider} provides no {choice.op} in this process")
        plugin, provider = by_label[choice.op, choice.provider]
        op = _build(choice, provider, context_for(plugin))
        built[choice.slot] = op if wrap is None else wrap(choice, op)
    table: OpTable = type("OpTable", (OpTable,), {"__slots__": tuple(built)})()
    for slot, op in built.items():
        object.__setattr__(table, slot, op)
    return table


def _build(choice: Choice, provider: Provider, context: BuildContext) -> Any:
    request = request_from_data(choice.request)
    try:
        build = provider.build.load() if isinstance(provider.build, LazyRef) else provider.build
        op = build(request, context)
        missing = [name for name in contract_methods(request) if not callable(getattr(op, name, None))]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PlanError(f"slot {choice.slot!r}: building {choice.provider}: {cause_line(error)}") from error
    if missing:
        raise PlanError(
            f"slot {choice.slot!r}: {choice.provider} built {op!r}, which lacks {', '.join(missing)}() of {choice.op}"
        )
    return op


def contract_methods(request: OpRequest) -> tuple[str, ...]:
    """Methods an operator must have: those of the protocol whose request class is ``<protocol>Request``.

    Requests that a plugin defines have no protocol here, so nothing is required of their operators.
    """
    if isinstance(request, SamplingRequest):
        return ("run",)  # Stage, Draw and Logprobs differ in arguments only
    protocol = getattr(api, type(request).__name__.removesuffix("Request"), None)
    if protocol is None:
        return ()
    return tuple(name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_")
