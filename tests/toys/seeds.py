"""Seeds of what tests draw: all follow from that of the run, which pytest-randomly prints (``--randomly-seed``)."""

from __future__ import annotations

from zlib import crc32

import pytest

RUN = [0]  # as it is outside of a run: tests start scripts that import their modules


def take(config: pytest.Config) -> None:
    """The seed of this run, before a test module is imported; 0 without pytest-randomly."""
    RUN[:] = [int(config.getoption("randomly_seed", 0) or 0)]


def module_seed(module: str) -> int:
    """31 bits for what a module draws at import or for several tests; a test by itself takes ``random.getrandbits``."""
    return crc32(f"{RUN[0]} {module}".encode()) >> 1
