"""Which chunks of which contexts the programs of :mod:`.decode_kernel` take: a list made on the device, once a step.

A recorded step does not know its contexts, so the host gives the number of programs and the device the rest. A context
is cut into as many equal chunks as it holds even shares of all tokens, rounded; one that holds no share is one chunk.
So equal contexts that fill the device are not cut, and a long one among short ones is. Nor are contexts cut that are
nearly equal and enough to keep the memory busy: putting chunks together takes longer than waiting for the longest.
Chunks stand in the list by length, the longest first: programs start in that order, so that what is left over for their
second turn is short.
"""

from __future__ import annotations

import attrs
import torch
import triton
import triton.language as tl

from .dependent import dependent, wait_turn

FIELDS = 16
"""Of an entry, nine in use: request, first row, rows, position of the first, first token and end of the chunk, its
result, the first of the tile, and chunks of the tile."""
AT_ONCE = 64
"""Tiles that a program of the kernel below places."""


@attrs.frozen(kw_only=True)
class WorkList:
    """``entries [bound, FIELDS]``, ``tiles [count, 4]`` (first row, rows, first result, results) and ``length [1]``,
    int32 of the device; ``programs``: chunks for each key head that are taken at a time."""

    entries: torch.Tensor
    tiles: torch.Tensor
    length: torch.Tensor
    programs: int

    @property
    def bound(self) -> int:
        """Most chunks that there can be."""
        return int(self.entries.shape[0])


@triton.jit
def span_of(tiles, positions, tile, count, IDENTITY: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr):
    """Of some tiles: request, first row, rows, first position, end of context, first token read, spans of N tokens."""
    there = tile < count
    if IDENTITY:
        request = tile
        first = tile
        rows = tl.full(tile.shape, 1, tl.int32)
    else:
        request = tl.load(tiles + 3 * tile, mask=there, other=0)
        first = tl.load(tiles + 3 * tile + 1, mask=there, other=0)
        rows = tl.load(tiles + 3 * tile + 2, mask=there, other=1)
    start = tl.load(positions + first, mask=there, other=0).to(tl.int32)
    end = tl.load(positions + first + rows - 1, mask=there, other=0).to(tl.int32) + 1
    begin = tl.zeros_like(start)
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // N * N
    return request, first, rows, start, end, begin, tl.where(there, tl.cdiv(end - begin, N), 0)


@triton.jit
def parts_of(spans, total, shares):
    """Chunks of a context of so many spans where ``shares`` of all are wanted, and the longest of them."""
    shares = tl.where(total > shares, (2 * spans * shares + total) // (2 * tl.maximum(total, 1)), spans)
    length = tl.cdiv(spans, tl.maximum(shares, 1))
    return tl.cdiv(spans, tl.maximum(length, 1)), length


@triton.jit
def chunks_of_all(
    tiles, positions, total, shares, count, AT_ONCE: tl.constexpr, IDENTITY: tl.constexpr, WINDOW: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """How many there are if so many shares are wanted."""
    number = 0
    for other in range(0, count, AT_ONCE):
        spans = span_of(tiles, positions, other + tl.arange(0, AT_ONCE), count, IDENTITY, WINDOW, N)[6]
        number += tl.sum(parts_of(spans, total, shares)[0], axis=0)
    return number


@triton.jit
def turns_of(place, parts, longest, programs):
    """Spans that the longest chunk of each turn has, together: how long the programs take, at most."""
    turns = tl.cdiv(place + parts, programs) - tl.cdiv(place, programs)
    return tl.sum(turns * longest, axis=0)


@triton.jit
def placed(
    tiles, positions, tile, spans, total, shares, count, AT_ONCE: tl.constexpr, IDENTITY: tl.constexpr,
    WINDOW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Of some tiles: chunks, spans of the longest, place of the first in the list, number of its result; and the number
    of all chunks."""
    parts, longest = parts_of(spans, total, shares)
    place = tl.zeros((AT_ONCE,), tl.int32)
    result = tl.zeros((AT_ONCE,), tl.int32)
    number = 0
    for other in range(0, count, AT_ONCE):
        beside = other + tl.arange(0, AT_ONCE)
        theirs = span_of(tiles, positions, beside, count, IDENTITY, WINDOW, N)[6]
        their_parts, their_longest = parts_of(theirs, total, shares)
        earlier = beside[None, :] < tile[:, None]
        longer = their_longest[None, :] > longest[:, None]
        sooner = longer | ((their_longest[None, :] == longest[:, None]) & earlier)
        place += tl.sum(tl.where(sooner, their_parts[None, :], 0), axis=1)
        result += tl.sum(tl.where(earlier, their_parts[None, :], 0), axis=1)
        number += tl.sum(their_parts, axis=0)
    return parts, longest, place, result, number


@triton.jit
def waiting_for_longest(rank, spans, count, filling, AT_ONCE: tl.constexpr):
    """Spans of all contexts that could be read while fewer than ``filling`` are left, the others having ended, if none
    is cut: each reads as fast as the rest until the memory is not busy any more. ``rank``: from the longest on."""
    longest = tl.max(spans, axis=0)
    there = tl.arange(0, AT_ONCE) < count
    behind = tl.sum(tl.where(there & (rank < filling), longest - spans, 0), axis=0)
    return behind + tl.maximum(filling - count, 0) * longest


@triton.jit(do_not_specialize=["count", "programs", "bound", "filling", "joining"])
def list_kernel(
    tiles,
    positions,
    entries,
    results,
    length,
    count,
    programs,
    bound,
    filling,
    joining,
    FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IDENTITY: tl.constexpr,
    WINDOW: tl.constexpr,
    N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles / AT_ONCE). The next kernel is not let in before the list is there: others read it before their turn,
    which could come before this kernel's."""
    wait_turn(DEPENDENT)
    total = 0
    for other in range(0, count, AT_ONCE):
        spans = span_of(tiles, positions, other + tl.arange(0, AT_ONCE), count, IDENTITY, WINDOW, N)[6]
        total += tl.sum(spans, axis=0)
    tile = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    request, first, rows, start, end, begin, spans = span_of(tiles, positions, tile, count, IDENTITY, WINDOW, N)
    # Contexts of less than half a share are chunks beyond the shares: then fewer are wanted, as many as there is room.
    shares = programs
    number = chunks_of_all(tiles, positions, total, shares, count, AT_ONCE, IDENTITY, WINDOW, N)
    if number > bound:
        shares = tl.maximum(shares - (number - bound), bound - count)
        number = chunks_of_all(tiles, positions, total, shares, count, AT_ONCE, IDENTITY, WINDOW, N)
        if number > bound:
            shares = bound - count
    parts, longest, place, result, number = placed(
        tiles, positions, tile, spans, total, shares, count, AT_ONCE, IDENTITY, WINDOW, N
    )
    if (count <= AT_ONCE) & (count < programs):
        # A few chunks more than programs would take a turn more: as many of each context as there is room for.
        fewer, shorter, sooner, first_result, sum_of_them = placed(
            tiles, positions, tile, spans, total, programs // count * count, count, AT_ONCE, IDENTITY, WINDOW, N
        )
        better = turns_of(sooner, fewer, shorter, programs) <= turns_of(place, parts, longest, programs)
        if better & (sum_of_them <= bound):
            parts, place, result, number = fewer, sooner, first_result, sum_of_them
        if (filling > 0) & (number > count):
            whole, spans_of_it, rank, first_result, sum_of_them = placed(
                tiles, positions, tile, spans, total, 0, count, AT_ONCE, IDENTITY, WINDOW, N
            )
            if waiting_for_longest(rank, spans, count, filling, AT_ONCE) <= joining:
                parts, place, result, number = whole, rank, first_result, sum_of_them
    tl.store(results + 4 * tile, first, mask=tile < count)
    tl.store(results + 4 * tile + 1, rows, mask=tile < count)
    tl.store(results + 4 * tile + 2, result, mask=tile < count)
    tl.store(results + 4 * tile + 3, parts, mask=tile < count)
    for part in range(tl.max(parts, axis=0)):
        there = part < parts
        entry = entries + (place + part) * FIELDS
        low = begin + spans * part // tl.maximum(parts, 1) * N
        high = tl.minimum(begin + spans * (part + 1) // tl.maximum(parts, 1) * N, end)
        tl.store(entry, request, mask=there)
        tl.store(entry + 1, first, mask=there)
        tl.store(entry + 2, rows, mask=there)
        tl.store(entry + 3, start, mask=there)
        tl.store(entry + 4, low, mask=there)
        tl.store(entry + 5, high, mask=there)
        tl.store(entry + 6, result + part, mask=there)
        tl.store(entry + 7, result, mask=there)
        tl.store(entry + 8, parts, mask=there)
    tl.debug_barrier()
    tl.atomic_xchg(length, number, sem="release")  # and this program does not end before all can read what it wrote


def work_list(
    tiles: torch.Tensor | None,
    positions: torch.Tensor,
    count: int,
    programs: int,
    window: int,
    span: int,
    filling: int = 0,
    joining: int = 0,
) -> WorkList:
    """The list for ``count`` tiles ``[count, 3]`` int32 (request, first row, rows), or None: tile i is row i.

    Args:
        positions: ``[T]`` int64.
        programs: for each key head.
        window: tokens that a row sees; 0: all.
        span: chunks begin and end at multiples of so many tokens.
        filling: contexts that keep the memory busy, uncut; 0: contexts are cut by their share alone, as few are and
            those of several rows, whose chunks a launch of its own puts together in any case.
        joining: spans of all contexts that are read in the time that it takes to put chunks together.
    """
    # More programs than fit at once cost 1 to 2 us, with nothing to do, too: few contexts are cut into as many as fit.
    few = 4 * count <= programs
    bound = programs if few else max(count, programs) + max(1, min(count, programs) // 2)
    entries, results, length = (
        torch.empty(shape, dtype=torch.int32, device=positions.device) for shape in ((bound, FIELDS), (count, 4), (1,))
    )
    list_kernel[(triton.cdiv(count, AT_ONCE),)](
        positions if tiles is None else tiles, positions, entries, results, length, count, programs, bound,
        0 if few or tiles is not None else filling, joining,
        FIELDS=FIELDS, AT_ONCE=AT_ONCE, IDENTITY=tiles is None, WINDOW=window, N=span, num_warps=8,
        **dependent(positions),
    )  # fmt: skip
    return WorkList(entries=entries, tiles=results, length=length, programs=programs)
