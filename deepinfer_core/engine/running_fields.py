"""Scheduling fields of the running sequences as columns by slot, so that a view of them is a few gathers."""

from __future__ import annotations

import numpy as np

from .request import Sequence
from .slot_table import SlotTable
from .waiting import WaitingQueue


class RunningFields:
    """Written when a sequence takes a slot; rows of free slots are stale.

    Arrays (``[slots]``): number, cached, priority, tenant int64; arrival, deadline, ttft, tpot float64, inf for none.
    """

    def __init__(self, slots: int) -> None:
        self.number = np.zeros(slots, np.int64)
        self.cached = np.zeros(slots, np.int64)
        self.priority = np.zeros(slots, np.int64)
        self.tenant = np.zeros(slots, np.int64)
        self.arrival = np.zeros(slots)
        self.deadline = np.zeros(slots)
        self.ttft = np.zeros(slots)
        self.tpot = np.zeros(slots)

    def renumber_tenants(self, waiting: WaitingQueue, slots: SlotTable) -> None:
        """New numbers for the tenants that have requests here: a table of all there ever were would grow for ever."""
        waiting.renumber_tenants()
        for slot in slots.running.tolist():
            sequence = slots.sequence[slot]
            assert sequence is not None
            self.tenant[slot] = waiting.tenant_index(sequence.request.tenant)

    def set(self, sequence: Sequence, *, cached: int, tenant: int) -> None:
        slot, request = sequence.slot, sequence.request
        self.number[slot] = sequence.number
        self.cached[slot] = cached
        self.priority[slot] = request.priority
        self.tenant[slot] = tenant
        self.arrival[slot] = request.metrics.arrival
        self.deadline[slot] = np.inf if request.deadline is None else request.deadline
        self.ttft[slot] = np.inf if request.ttft_target is None else request.ttft_target
        self.tpot[slot] = np.inf if request.tpot_target is None else request.tpot_target
