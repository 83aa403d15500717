"""How many threads the host's operators use: one for each physical core this process may run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import torch

SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def choose_threads(environ: Mapping[str, str] = os.environ, root: str = "/") -> int:
    """Threads for operators: torch's own number, but no more than physical cores unless the user set a number.

    Matrix kernels fill a core's arithmetic units; a second thread on it only shares them, and more threads than the
    control group may run make all of them wait.
    """
    threads = torch.get_num_threads()
    if any(environ.get(name) for name in SETTINGS):
        return threads
    return max(1, min(threads, physical_cores(os.sched_getaffinity(0), root), cpu_quota(root)))


def physical_cores(usable: set[int], root: str = "/") -> int:
    """Physical cores behind these processor numbers; the kernel tells which numbers share one."""
    cores = set()
    for number in usable:
        siblings = Path(root, f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text(encoding="ascii").strip())
        except OSError:
            cores.add(str(number))
    return len(cores)


def cpu_quota(root: str = "/") -> int:
    """Processors that the control group may use at once, rounded up; a large number when it is not limited."""
    unlimited = 1 << 20
    try:
        quota, period = Path(root, "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else max(1, ceil(int(quota) / int(period)))
