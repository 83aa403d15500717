"""A device that joins groups by means of its own, wrongly."""

from __future__ import annotations

import attrs

from deepinfer_core.api import ProcessGroup
from deepinfer_core.conformance.ranks import join_host_group
from deepinfer_core.cpu.device import CpuDevice


class Backwards(CpuDevice):
    """Process 0 becomes the last rank."""

    def join(self, rank: int, size: int, init_method: str, timeout: float) -> ProcessGroup:
        joined: ProcessGroup = join_host_group(rank, size, init_method, timeout)
        return attrs.evolve(joined, rank=size - 1 - rank)
