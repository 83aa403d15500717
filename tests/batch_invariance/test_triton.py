"""The kernels for any device that Triton compiles for: on an accelerator where there is one, else in the interpreter.

The interpreter must be asked for before Triton is imported, so that the cases run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton")

ON_HARDWARE = torch.accelerator.is_available()
CASES = Path(__file__).with_name("kernel_cases.py")


@pytest.fixture(scope="module")
def report() -> str:
    """One line for each case, with how it ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:randomly", "-p", "no:cacheprovider", str(CASES)]
    environ = {**os.environ} if ON_HARDWARE else {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout


def check(report: str, name: str, cases: int) -> None:
    assert "FAILED" not in report, report
    assert "ERROR" not in report, report
    assert report.count(f"PASSED tests/batch_invariance/kernel_cases.py::{name}") == cases, report


def test_gemm(report: str) -> None:
    check(report, "test_gemm", 10 if ON_HARDWARE else 6)


@pytest.mark.skipif(ON_HARDWARE, reason="what is planted is planted into the interpreter")
def test_what_moves_bits_is_not_used(report: str) -> None:
    check(report, "test_a_tile_of_other_bits_is_not_used", 1)
    check(report, "test_a_device_that_moves_rows_is_refused", 1)


def test_norm(report: str) -> None:
    check(report, "test_norm", 8 if ON_HARDWARE else 6)


def test_log_softmax(report: str) -> None:
    check(report, "test_log_softmax", 3 if ON_HARDWARE else 2)


def test_combine(report: str) -> None:
    check(report, "test_combine", 2)


def test_they_serve_other_devices_than_the_host(report: str) -> None:
    check(report, "test_they_serve_other_devices_than_the_host", 4)
