"""Every kernel compiles for all chips without a GPU, within their limits, and uses the units it is meant to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepinfer_nvidia_sm100.probe import CAPABILITIES

SCRIPT = Path(__file__).with_name("cross_compile.py")
SHARED_BYTES = 232_448  # of one program, on both
TENSOR_MEMORY = 512  # columns, on 10.x
MATRIX_UNIT = {90: "wgmma.mma_async", 100: "tcgen05.mma", 103: "tcgen05.mma"}
ON_MATRIX_UNIT = {
    "described gate",
    "described rows",
    "fixed chunks",
    "linear fixed tile",
    "prompt",
    "prompt head_dim 256",
    "gated 1 row",
    "gated 24 rows",
    "between 1 row",
    "between 64 rows",
    "between by descriptors",
    "prompt head_dim 64",
    "linear 1 row",
    "linear 24 rows",
    "linear 64 rows",
    "linear logits",
    "fp8 1 row",
    "fp8 64 rows",
}
IN_FP8 = {
    "fp8 rounded 1 row",
    "fp8 rounded 64 rows",
    "fp8 rounded 4096 rows",
    "fp8 rounded by roles",
    "fp8 rounded by tiles",
}
BY_WARPS = {
    "decode",
    "decode drafts",
    "decode many",
    "decode window",
    "fixed decode",
    "fp8 cache decode",
    "fp8 cache prompt",
    "held 1 row",
    "held 16 rows",
}
"""Too few rows for the larger unit's instructions, on one generation at least: those of single warps."""
ONLY_90 = {"fp8 rounded by roles"}
QUICK = {"decode", "linear 1 row", "fp8 rounded 1 row"}
ALL = [
    *QUICK,
    "pointwise",
    "fused",
    "gated 1 row",
    "gated 24 rows",
    "between 1 row",
    "between 64 rows",
    "between by descriptors",
    "described rows",
    "described gate",
    "sampling",
    "prompt",
    "fixed chunks",
    "fixed decode",
    "decode drafts",
    "decode many",
    "decode float32",
    "decode window",
    "prompt float32",
    "prompt head_dim 256",
    "prompt head_dim 64",
    "linear 24 rows",
    "linear 64 rows",
    "linear logits",
    "linear fixed tile",
    "one row in registers",
    "held 1 row",
    "held 16 rows",
    "fp8 1 row",
    "fp8 64 rows",
    "fp8 widened",
    "fp8 rounded 64 rows",
    "fp8 rounded 4096 rows",
    "fp8 rounded by roles",
    "fp8 rounded by tiles",
    "fp8 cache write",
    "fp8 cache decode",
    "fp8 cache prompt",
]


def cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(capability, case, marks=[] if case in QUICK and capability != 103 else [slow])
        for capability in MATRIX_UNIT
        for case in sorted(ALL)
        if capability == 90 or case not in ONLY_90
    ]


@pytest.mark.parametrize(("capability", "case"), cases())
def test_a_kernel_compiles_within_the_chips_limits(capability: int, case: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), case],
        env={**environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        # Settling sampled rows keeps a few words there.
        few_bytes = 64 if case == "sampling" else 0
        assert kernel["stack"] <= few_bytes, kernel
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert kernel["tensor_memory"] <= TENSOR_MEMORY, kernel
    if case in ON_MATRIX_UNIT:
        assert any(MATRIX_UNIT[capability] in kernel["matrix"] for kernel in kernels), kernels
    if case in BY_WARPS:
        assert any(kernel["matrix"] for kernel in kernels), kernels
    if case in IN_FP8:
        assert any(kernel["fp8"] for kernel in kernels), kernels


def test_every_case_is_listed() -> None:
    source = SCRIPT.read_text()
    table = source[source.index("CASES:") : source.index("def described")]
    assert {line.split('"')[1] for line in table.splitlines() if line.startswith('    "')} == set(ALL)


def test_every_chip_that_is_served_is_compiled_for() -> None:
    assert {10 * major + minor for major, minor in CAPABILITIES} == set(MATRIX_UNIT)
