"""An operator whose rows are independent, described so that every general check can be made of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import attrs
import torch

from deepinfer_core.api import OpRequest

Tensors = Mapping[str, torch.Tensor]
Put = Callable[[torch.Tensor], torch.Tensor]
Oracle = Callable[[OpRequest], Any]
"""A request -> the reference operator on the host."""

R = TypeVar("R", bound=OpRequest)

_FLOATS = ("float32", "float16", "bfloat16")


class Operation:
    """One operator, one request, one way of calling it.

    Attributes:
        request: what a provider is asked for.
        variant: tells this operation's cases from others of the same operator; may be empty.
        told: what a message adds to the name, such as a drawn request.
        overwritten: inputs that the contract lets the operator overwrite.
        exact: results are defined bit for bit.
        sorted_rows: rows have an order that a call must keep.
    """

    variant: str = ""
    told: str = ""
    overwritten: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = False
    sorted_rows: ClassVar[bool] = False
    request: Any

    @property
    def name(self) -> str:
        """``"pointwise.rms_norm"``, or ``"pointwise.rms_norm[add]"``."""
        return f"{self.request.op}[{self.variant}]" if self.variant else str(self.request.op)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, getattr(self.request, "dtype", "float32"))
        return found

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        """Inputs of ``rows`` rows, on the host, in the request's dtypes. Every one has its rows first."""
        raise NotImplementedError

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        """Weights, as a checkpoint would hold them, on the host."""
        return {}

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        """What :meth:`call` gets of the weights: packed, or put on the device."""
        return {name: put(value) for name, value in constants.items()}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        """Run the operator once; outputs by name, rows first."""
        raise NotImplementedError

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each output."""
        return {"y": self.dtype}

    def row_disjoint(self, output: str) -> bool:
        """False for an output that the contract lets lie in an overwritten input."""
        return not self.overwritten

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        """Tolerance of every value of every output; inputs and expected values in float64."""
        return {name: torch.zeros(()) for name in expected}

    def extremes(self, rows: int, draw: torch.Generator) -> Tensors | None:
        """As :meth:`sample`, at magnitudes that the formula still has an answer for; None: nothing to add."""
        return None

    # ---- the definition

    def expected(self, oracle: Oracle, inputs: Tensors, constants: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
        """Expected values and their bounds, from the reference operator for :func:`widened`."""
        wide = {name: _wide(value) for name, value in inputs.items()}
        op = oracle(widened(self.request))
        weights = self.prepare(op, {name: _wide(value) for name, value in constants.items()}, lambda t: t)
        outputs = {name: value.clone() for name, value in self.call(op, copies(wide), weights).items()}
        return outputs, self.bounds(wide, constants, outputs)


def widened(request: R) -> R:
    """The request in float64, on the host, without demands: what the definition is asked for."""
    changes: dict[str, Any] = {"device_type": "cpu", "demands": frozenset()}
    for field in attrs.fields(type(request)):
        if field.name.endswith("dtype") and getattr(request, field.name) in _FLOATS:
            changes[field.name] = "float64"
    return attrs.evolve(request, **changes)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype in _NARROW:
        return value.to(torch.float64)
    if isinstance(value, list | tuple):
        return [_wide(part) for part in value]
    return value


_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def copies(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def generator(name: str) -> torch.Generator:
    """A generator seeded by a name, the same in every run and process."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def normal(draw: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Normal values, rounded to ``dtype``."""
    return (torch.randn(*shape, generator=draw) * scale).to(dtype)
