"""Comparing a result with what was expected, and saying where they differ."""

from __future__ import annotations

import torch

from .case import Mismatch


def check_form(name: str, found: object, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """``found`` if it is a tensor of this shape and dtype.

    Raises:
        Mismatch: it is not.
    """
    if not isinstance(found, torch.Tensor):
        raise Mismatch(f"{name}: found {type(found).__name__}, expected a tensor")
    if tuple(found.shape) != shape:
        raise Mismatch(f"{name}: found shape {tuple(found.shape)}, expected {shape}")
    if found.dtype != dtype:
        raise Mismatch(f"{name}: found dtype {found.dtype}, expected {dtype}")
    return found


def check_close(name: str, found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """Hold ``found`` to ``bound``, element by element; all three on the host.

    Where ``expected`` is infinite the same infinity is asked for. Rows whose expected values hold a NaN must show it:
    something in the row that is not finite, so that whatever comes next can tell.

    Raises:
        Mismatch: with the worst position, both values and the tolerance.
    """
    wide = found.to(torch.float64)
    expected = expected.to(torch.float64)
    bound = bound.to(torch.float64).expand(expected.shape)
    broken = _rows_with_nan(expected)
    wrong = ~((wide - expected).abs() <= bound) & (wide != expected)
    wrong &= ~broken
    if wrong.any():
        excess = torch.where(wrong, torch.nan_to_num((wide - expected).abs(), nan=torch.inf) / bound, -1.0)
        place = torch.unravel_index(excess.argmax(), wide.shape)
        raise Mismatch(
            f"{name}{_place(place)}: found {_number(wide[place])}, expected {_number(expected[place])}, off by "
            f"{_number((wide[place] - expected[place]).abs())}, tolerance {_number(bound[place])}; "
            f"{int(wrong.sum())} of {wrong.numel()} values are off"
        )
    _check_seen(name, wide, broken)


def check_equal(name: str, found: torch.Tensor, expected: torch.Tensor, why: str = "exactly") -> None:
    """Hold ``found`` to ``expected`` bit for bit (any two NaNs are equal, and so are 0 and -0).

    Raises:
        Mismatch: with the first position that differs.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Mismatch(
            f"{name}: found {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    wrong = found != expected
    if found.is_floating_point():
        wrong &= ~(found.isnan() & expected.isnan())
    if wrong.any():
        place = torch.unravel_index(wrong.flatten().to(torch.int8).argmax(), found.shape)
        raise Mismatch(
            f"{name}{_place(place)}: found {_number(found[place])}, expected {_number(expected[place])} {why}; "
            f"{int(wrong.sum())} of {wrong.numel()} values differ"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when two tensors of the same form hold the same bytes; a 16-bit NaN may change its payload on the way."""
    if not a.numel():  # nothing has no strides that a view could rely on
        return a.shape == b.shape
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.equal(a.isnan(), b.isnan()) and same_bits(*(t.nan_to_num(0.0).view(torch.int16) for t in (a, b)))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _rows_with_nan(expected: torch.Tensor) -> torch.Tensor:
    broken = expected.isnan()
    if expected.dim() > 1:
        broken = broken.flatten(1).any(1).view(-1, *([1] * (expected.dim() - 1))).expand(expected.shape)
    return broken


def _check_seen(name: str, found: torch.Tensor, broken: torch.Tensor) -> None:
    if not broken.any():
        return
    rows = broken.flatten(1).any(1) if broken.dim() > 1 else broken
    finite = found.isfinite().flatten(1).all(1) if found.dim() > 1 else found.isfinite()
    hidden = (rows & finite).nonzero().flatten()
    if len(hidden):
        raise Mismatch(f"{name}, row {int(hidden[0])}: found only finite values, expected the NaN of its input to show")


def _place(place: tuple[torch.Tensor, ...]) -> str:
    numbers = [int(index) for index in place]
    if not numbers:
        return ""
    rest = ", ".join(map(str, numbers[1:]))
    return f" at row {numbers[0]}" + (f", position [{rest}]" if rest else "")


def _number(value: torch.Tensor) -> str:
    item = value.item()
    return f"{item:.7g}" if isinstance(item, float) else str(item)
