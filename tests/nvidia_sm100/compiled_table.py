"""The table of compiled kernels in docs/results-gpu.md: ``python tests/nvidia_sm100/compiled_table.py > table.md``.

One row for each case of cross_compile.py, of the kernel with the most shared memory, and of those the one with the most
registers a thread. Each case is compiled in a process of its own, for 9.0 and 10.0; no GPU is needed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cross_compile import CASES

SCRIPT = Path(__file__).with_name("cross_compile.py")
NAMES = {
    "wgmma.mma_async": ("wgmma", " e4m3"),
    "tcgen05.mma": ("tcgen05", " f8f6f4"),
    "mma.sync": ("mma.sync", " e4m3"),
}
"""Of the matrix unit's instructions in PTX: what the table calls them, and what it adds for products of FP8."""


def largest(capability: int, case: str) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(capability), case],
            env={**os.environ, "TRITON_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    return max(kernels, key=lambda kernel: (kernel["shared"], kernel["registers"]), default=None)


def unit(kernel: dict[str, Any] | None) -> str:
    if kernel is None:
        return "not for it"
    if not kernel["matrix"]:
        return "–"
    name, of_fp8 = NAMES[kernel["matrix"][0]]
    return name + (of_fp8 if kernel["fp8"] else "")


def both(old: dict[str, Any] | None, new: dict[str, Any] | None, key: str) -> str:
    return " / ".join("–" if kernel is None else f"{kernel[key]:,}" for kernel in (old, new))


def main() -> None:
    print("| case | matrix unit, 9.0 | 10.0 | registers | shared bytes | tensor memory |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        old, new = largest(90, case), largest(100, case)
        memory = 0 if new is None else new["tensor_memory"]
        cells = [case, unit(old), unit(new), both(old, new, "registers"), both(old, new, "shared"), str(memory)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
