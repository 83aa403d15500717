"""The engine's own tests, run a second time on another backend in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ENGINE_TESTS = (
    *(f"engine/test_engine_{part}.py" for part in ("faults", "preemption", "prefix_cache", "results", "streaming")),
    "engine/test_memory_pressure.py",
    "cases/test_a03_stop_in_a_step.py",
    "cases/test_a19_penalties_ahead.py",
    "models/test_dense_parity.py::test_one_shot",
    "models/test_dense_parity.py::test_beside_strangers[qwen3-ahead]",
    "models/test_dense_parity.py::test_preempted_and_resumed[qwen3-sliding-ahead-cold]",
)
"""The others pass too, but for those that pin what a synchronous step does."""

POLICY_ALONE = "engine/test_engine_faults.py::test_nonsense_policy_cannot_harm"
"""Its 160 combinations of wrong preferences are about the planner, which is the same on every device."""

ONE_STEP_AT_A_TIME = ("engine/test_engine_prefix_cache.py::test_window_groups_share_where_a_request_ended",)
"""Counts the blocks that a synchronous loop has freed; one step ahead it is another number."""


def run_engine_tests(accelerator: str, site: Path) -> int:
    """How many passed, with the distributions in ``site`` installed. Fails when one failed."""
    environ = {**os.environ, "TEST_ACCELERATOR": accelerator, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    tests = [f"tests/{test}" for test in ENGINE_TESTS]
    left_out = [f"--deselect=tests/{test}" for test in (*ONE_STEP_AT_A_TIME, POLICY_ALONE)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests, *left_out],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
