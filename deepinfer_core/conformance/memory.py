"""Memory that tells on an operator: guarded inputs, snapshots, and allocations that come back full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from .case import Mismatch
from .compare import same_bits

GUARD = 256
"""Elements before and behind a guarded tensor: enough that vector loads stay aligned and overruns stay inside."""


def poison(dtype: torch.dtype) -> float | int:
    """The value that memory nobody should read is filled with."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


@attrs.frozen(eq=False)
class Guarded:
    """A tensor in the middle of poisoned memory, with a copy of what it held.

    Attributes:
        tensor: what the operator gets: a contiguous view, or one with wider rows.
        whole: all of the memory. before: its bytes when it was made, on the host.
        mask: True where ``whole`` is not the tensor's.
    """

    tensor: torch.Tensor
    whole: torch.Tensor
    before: torch.Tensor
    mask: torch.Tensor


def guard(values: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor], *, wide_rows: int = 0) -> Guarded:
    """``values`` (host) on the device, in the middle of poison.

    Args:
        put: host tensor -> device tensor.
        wide_rows: elements of poison behind each row, so that rows are apart in memory, as the parts of a merged
            projection are.
    """
    fill = poison(values.dtype)
    if wide_rows and values.dim() > 1:
        rows, row = values.shape[0], values[:1].numel()
        body = torch.full((rows, row + wide_rows), fill, dtype=values.dtype)
        body[:, :row] = values.reshape(rows, row)
        inside = torch.zeros(body.shape, dtype=torch.bool)
        inside[:, :row] = True
        strides = (row + wide_rows, *torch.empty(values.shape[1:], device="meta").stride())
    else:
        body, inside = values.reshape(-1), torch.ones(values.numel(), dtype=torch.bool)
        strides = torch.empty(values.shape, device="meta").stride()
    edge = torch.full((GUARD,), fill, dtype=values.dtype)
    host = torch.cat((edge, body.reshape(-1), edge))
    outside = torch.cat((torch.ones(GUARD), 1.0 - inside.reshape(-1).float(), torch.ones(GUARD))).bool()
    whole = put(host)
    return Guarded(whole.as_strided(values.shape, strides, GUARD), whole, host, outside)


def check_guards(name: str, guarded: Mapping[str, Guarded], overwritten: frozenset[str], get: Any) -> None:
    """Nothing outside the tensors changed, and nothing inside those that are not to be overwritten.

    Raises:
        Mismatch: naming the input.
    """
    for key, one in guarded.items():
        now = get(one.whole)
        if not same_bits(now[one.mask], one.before[one.mask]):
            raise Mismatch(
                f"{name}: wrote outside of {key!r}, beside or behind its rows; expected nothing there to change"
            )
        if key not in overwritten and not same_bits(now, one.before):
            raise Mismatch(f"{name}: changed its input {key!r}; expected it to be left alone")


def check_fresh(name: str, outputs: Mapping[str, torch.Tensor], guarded: Mapping[str, Guarded], may: Any) -> None:
    """No output lies in an input's memory, save where the contract allows it.

    Raises:
        Mismatch: naming both.
    """
    for key, output in outputs.items():
        for other, one in guarded.items():
            if output.numel() and other not in may and shares_memory(output, one.whole):
                raise Mismatch(f"{name}: output {key!r} lies in the memory of input {other!r}; expected fresh memory")


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, torch fills memory that it hands out uninitialised with NaN (integers: their largest value)."""
    was, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        deterministic.fill_uninitialized_memory = fill
