"""Operator requests as plain data, and back: how a plan carries them to worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from cattrs.preconf.json import make_converter

from deepinfer_core.api import OpRequest, PlanError

from .nearest import suggest

_converter = make_converter(forbid_extra_keys=True)


def request_to_data(request: OpRequest) -> dict[str, Any]:
    """``{"op": ..., field: ...}`` in JSON's own types: tuples and sets become lists, sets sorted.

    Raises:
        PlanError: a field holds something that is not plain data.
    """
    fields = _plain(request, type(request).__name__)
    return {"op": request.op, **fields}


def request_from_data(data: Mapping[str, Any]) -> OpRequest:
    """The request that :func:`request_to_data` described.

    Raises:
        PlanError: no imported request class has this operator, or the fields do not fit it.
    """
    fields = dict(data)
    op = fields.pop("op", "")
    classes = {kind.op: kind for kind in _subclasses(OpRequest) if kind.op}
    if op not in classes:
        raise PlanError(f"no request class has op={op!r}{suggest(str(op), classes)}")
    try:
        return _converter.structure(fields, classes[op])
    except Exception as error:
        raise PlanError(f"{classes[op].__name__}: fields do not fit: {fields}") from error


def _subclasses(base: type[OpRequest]) -> Iterable[type[OpRequest]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if attrs.has(type(value)):
        return {f.name: _plain(getattr(value, f.name), f"{where}.{f.name}") for f in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item, where) for item in value)
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    raise PlanError(f"{where}={value!r}: a request must hold plain data")
