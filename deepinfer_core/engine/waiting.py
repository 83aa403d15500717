"""Waiting sequences in arrival order, with their scheduling fields as columns."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import numpy as np

from .request import Sequence

_FIELDS = ("arrival", "prompt", "cached", "output", "max_tokens", "priority", "tenant", "deadline", "ttft", "tpot")


class WaitingQueue:
    """Sorted by arrival number: a preempted sequence returns to where its arrival puts it.

    Columns are float64, one row per waiting sequence, kept so that a policy's view of thousands of waiting
    requests is a slice and not a loop.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._by_number: dict[int, Sequence] = {}
        self._row: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._columns = np.zeros((len(_FIELDS), 64))
        self._tenants: dict[str, int] = {}
        self.version = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._by_number[n] for n in self._numbers)

    @property
    def tenants(self) -> list[str]:
        return list(self._tenants)

    def tenant_index(self, tenant: str) -> int:
        return self._tenants.setdefault(tenant, len(self._tenants))

    def at(self, index: int) -> Sequence:
        return self._by_number[self._numbers[index]]

    def before(self, sequence: Sequence) -> int:
        """How many arrived before a sequence and wait."""
        return bisect.bisect_left(self._numbers, sequence.number)

    def add(self, sequence: Sequence, cached: int = 0) -> None:
        """Queue a sequence; ``cached`` is what the prefix cache held of it just now."""
        number = sequence.number
        bisect.insort(self._numbers, number)
        self._by_number[number] = sequence
        row = self._free_rows.pop() if self._free_rows else len(self._row)
        if row >= self._columns.shape[1]:
            self._columns = np.pad(self._columns, ((0, 0), (0, self._columns.shape[1])))
        self._row[number] = row
        request = sequence.request
        self._columns[:, row] = (
            request.metrics.arrival,
            sequence.prompt_len,
            cached,
            len(sequence.tokens) - sequence.prompt_len,
            request.max_len - sequence.prompt_len,
            request.priority,
            self.tenant_index(request.tenant),
            np.inf if request.deadline is None else request.deadline,
            np.inf if request.ttft_target is None else request.ttft_target,
            np.inf if request.tpot_target is None else request.tpot_target,
        )
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        number = sequence.number
        del self._numbers[bisect.bisect_left(self._numbers, number)]
        del self._by_number[number]
        self._free_rows.append(self._row.pop(number))
        self.version += 1

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """Column name -> float64 array in arrival order."""
        rows = np.fromiter((self._row[n] for n in self._numbers), np.int64, len(self._numbers))
        return dict(zip(_FIELDS, self._columns[:, rows], strict=True))

    def ids(self) -> list[str]:
        return [self._by_number[n].request.request_id for n in self._numbers]
