"""Waiting sequences in arrival order, with their scheduling fields as columns."""

from __future__ import annotations

import bisect
import collections.abc as abc
from collections.abc import Iterator
from typing import Any

import numpy as np

from .request import Sequence

WHOLE = ("prompt", "cached", "output", "max_tokens", "priority", "tenant")
TIMES = ("arrival", "deadline", "ttft", "tpot")
_CACHED, _TENANT = WHOLE.index("cached"), WHOLE.index("tenant")


class RequestIds(abc.Sequence[str]):
    """Request ids of ``sequences[places[i]]``, looked up when asked for: a view of thousands costs nothing."""

    def __init__(self, sequences: abc.Sequence[Sequence | None], places: np.ndarray[Any, Any] | range) -> None:
        self._sequences = sequences
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        sequence = self._sequences[self._places[index]]
        assert sequence is not None
        return sequence.request.request_id


class WaitingQueue:
    """Sorted by arrival number: a preempted sequence returns to where its arrival puts it.

    The columns lie in arrival order in one piece, so that a policy's view of thousands of waiting requests is a
    slice: arrivals are appended, and what leaves from the middle moves the shorter side by one place.
    ``version`` changes with the waiting set and with what is known of it.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._sequences: list[Sequence] = []
        self._start = 0
        self._whole = np.zeros((len(WHOLE), 64), np.int64)
        self._times = np.zeros((len(TIMES), 64))
        self._tenant_index: dict[str, int] = {}
        self.tenants: list[str] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, sequence: Sequence) -> bool:
        index = self.before(sequence)
        return index < len(self._numbers) and self._numbers[index] == sequence.number

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def tenant_index(self, tenant: str) -> int:
        index = self._tenant_index.setdefault(tenant, len(self._tenant_index))
        if index == len(self.tenants):
            self.tenants.append(tenant)
        return index

    def renumber_tenants(self) -> None:
        """Forget the tenants of requests that have left; those that wait get numbers from 0 on."""
        self._tenant_index, self.tenants = {}, []
        numbers = [self.tenant_index(sequence.request.tenant) for sequence in self._sequences]
        self._whole[_TENANT, self._start : self._start + len(numbers)] = numbers
        self.version += 1

    def at(self, index: int) -> Sequence:
        return self._sequences[index]

    def before(self, sequence: Sequence) -> int:
        """How many arrived before a sequence and wait."""
        return bisect.bisect_left(self._numbers, sequence.number)

    def add(self, sequence: Sequence, cached: int = 0) -> None:
        """Queue a sequence; ``cached`` is what the prefix cache held of it just now."""
        index = self.before(sequence)
        self._numbers.insert(index, sequence.number)
        self._sequences.insert(index, sequence)
        column = self._open(index)
        request = sequence.request
        self._whole[:, column] = (
            sequence.prompt_len,
            cached,
            len(sequence.tokens) - sequence.prompt_len,
            request.max_len - sequence.prompt_len,
            request.priority,
            self.tenant_index(request.tenant),
        )
        self._times[:, column] = (
            request.metrics.arrival,
            np.inf if request.deadline is None else request.deadline,
            np.inf if request.ttft_target is None else request.ttft_target,
            np.inf if request.tpot_target is None else request.tpot_target,
        )
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        index = self.before(sequence)
        assert self._numbers[index] == sequence.number
        del self._numbers[index]
        del self._sequences[index]
        self._close(index)
        self.version += 1

    def set_cached(self, sequence: Sequence, cached: int) -> None:
        """The prefix cache now holds so much of a waiting sequence."""
        column = self._start + self.before(sequence)
        if self._whole[_CACHED, column] != cached:
            self._whole[_CACHED, column] = cached
            self.version += 1

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Column name -> read-only array in arrival order, int64 or (times) float64. Valid until the next change."""
        part = slice(self._start, self._start + len(self._numbers))
        names = (*WHOLE, *TIMES)
        columns = dict(zip(names, (*self._whole[:, part], *self._times[:, part]), strict=True))
        for column in columns.values():
            column.flags.writeable = False
        return columns

    def ids(self) -> RequestIds:
        return RequestIds(self._sequences, range(len(self._sequences)))

    def _open(self, index: int) -> int:
        """Make room for column ``index`` of the ``len(self)`` there are from now on; returns where it lies."""
        others = len(self._numbers) - 1
        if self._start and index < others - index:
            self._start -= 1
            self._move(self._start + 1, index, -1)
        else:
            if self._start + others == self._whole.shape[1]:
                self._make_space(others)
            self._move(self._start + index, others - index, 1)
        return self._start + index

    def _close(self, index: int) -> None:
        after = len(self._numbers) - index
        if index < after:
            self._move(self._start, index, 1)
            self._start += 1
        else:
            self._move(self._start + index + 1, after, -1)

    def _move(self, first: int, count: int, by: int) -> None:
        if count:
            for table in (self._whole, self._times):
                table[:, first + by : first + by + count] = table[:, first : first + count]

    def _make_space(self, used: int) -> None:
        """Centre the columns in tables at least half of which are free."""
        capacity = self._whole.shape[1]
        wider = capacity if 2 * used <= capacity else 2 * capacity
        start = (wider - used) // 4
        for name in ("_whole", "_times"):
            old = getattr(self, name)
            new = np.zeros((len(old), wider), old.dtype)
            new[:, start : start + used] = old[:, self._start : self._start + used]
            setattr(self, name, new)
        self._start = start
