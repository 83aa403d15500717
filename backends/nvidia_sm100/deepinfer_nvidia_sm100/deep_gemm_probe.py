"""Whether DeepGEMM (distribution ``deepinfer-gemm``, module ``deep_gemm``) can be used here, without importing it.

The extension carries its own copy of C++'s regular expressions, which clash with those of another libstdc++ that the
process has loaded: its first call then ends the process. So the first use in a process is a small product in a child.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = "deep_gemm"
EXTRA = "pip install deepinfer-nvidia-sm100[deepgemm]"
SECONDS = 120.0
TRIAL = """
import torch, deep_gemm
x = torch.ones((128, 128), device="cuda").to(torch.float8_e4m3fn)
scale, one = torch.ones((1, 128), device="cuda").t(), torch.ones((1, 1), device="cuda")
out = torch.zeros((128, 128), device="cuda", dtype=torch.bfloat16)
deep_gemm.fp8_gemm_nt((x, scale), (x, one), out, recipe=(1, 128, 128))
assert bool((out == 128).all())
"""


def missing() -> str:
    """Why DeepGEMM is not offered, with the fix; ``""`` where it is installed and has a compiler for its kernels."""
    if importlib.util.find_spec(MODULE) is None:
        return f"module {MODULE} is not installed: {EXTRA}"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not Path(home, "bin", "nvcc").exists():
        return f"DeepGEMM compiles with nvcc, found neither on PATH nor in {home}: set CUDA_HOME"
    return ""


@functools.cache
def failure() -> str:
    """What a first product in a child process died of; ``""`` if it was right. Asked once a process."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return last or f"the trial ended with status {done.returncode}; try LD_PRELOAD=libstdc++.so.6"
