"""The gathers and scatters around a forward pass: whole numbers, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from deepinfer_core.api import AppendTokensRequest, InputIdsRequest, SlotMappingRequest
from deepinfer_core.conformance.case import Case
from deepinfer_core.conformance.compare import check_equal
from deepinfer_core.conformance.memory import check_guards, guard
from deepinfer_core.conformance.target import Target

from .listing import operation_cases
from .operation import Operation, Tensors, generator
from .steps import BLOCK

SLOTS, LENGTH = 9, 80


class InputIds(Operation):
    """Ids from the history."""

    exact = True

    def __init__(self) -> None:
        self.request = InputIdsRequest()

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {
            "row_slots": torch.randint(0, SLOTS, (rows,), generator=draw),
            "positions": torch.randint(0, LENGTH, (rows,), generator=draw),
        }

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        return {"history": torch.randint(0, 2**31 - 1, (SLOTS, LENGTH), generator=draw, dtype=torch.int32)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"ids": op.run(weights["history"], inputs["row_slots"], inputs["positions"])}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"ids": torch.int64}


class SlotMapping(Operation):
    """``block_table[row, position // block_size] * block_size + position % block_size``."""

    exact = True

    def __init__(self) -> None:
        self.request = SlotMappingRequest(block_size=BLOCK)

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        return {
            "row_requests": torch.randint(0, SLOTS, (rows,), generator=draw),
            "positions": torch.randint(0, LENGTH, (rows,), generator=draw),
        }

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        # Blocks so high that a product in 32 bits would not hold them.
        table = torch.randint(0, 2**31 - 1, (SLOTS, LENGTH // BLOCK), generator=draw, dtype=torch.int32)
        return {"block_table": table}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"slots": op.run(weights["block_table"], inputs["row_requests"], inputs["positions"])}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"slots": torch.int64}


def _appends(target: Target) -> str:
    """The tokens are where they belong, -1 as 0, and nothing else changed; no token changes nothing."""
    chosen = target.choose(AppendTokensRequest(device_type=target.device.info.type))
    label = f"runner.append_tokens by {chosen.label}"
    draw = generator("append")
    history = torch.randint(0, 1000, (SLOTS, LENGTH), generator=draw, dtype=torch.int32)
    slots, positions = torch.tensor([8, 0, 3, 3, 5]), torch.tensor([79, 0, 7, 8, 40])
    tokens = torch.tensor([5, 2**31 - 1, -1, 9, 0])
    kept = target.work(lambda: {"history": guard(history, target.put)})
    for count in (0, 1, 5):
        given = (slots[:count], positions[:count], tokens[:count])
        target.work(lambda given=given: chosen.operator.run(kept["history"].tensor, *map(target.put, given)))  # type: ignore[misc]
        check_guards(label, kept, frozenset({"history"}), target.get)
        history[slots[:count], positions[:count]] = tokens[:count].clamp(min=0).to(torch.int32)
        check_equal(f"{label}, history after {count} tokens", target.get(kept["history"].tensor), history)
    return chosen.label


def cases(dtype: str) -> Iterator[Case]:
    """Every case of these operators."""
    for kind in (InputIds, SlotMapping):
        yield from operation_cases(kind, dtype="int64", without=("broken_rows", "extremes"))
    yield Case(id="runner.append_tokens/int64/tokens", family="runner", tier="boots", check=_appends, required=True)
