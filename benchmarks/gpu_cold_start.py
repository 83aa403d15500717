"""From starting Python to the first token on a GPU: with an empty cache of compiled kernels, with what such a start
left, and after ``deepinfer warmup``.

``python benchmarks/gpu_cold_start.py --out results`` (about a minute). Each start is a process of its own; the weights
lie in memory. Loading them is counted apart: from the last operator built to the last tensor placed. At the end it
counts the kernels that requests of other lengths and parameters still had to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, print_table
from gpu_common import Results, plugin_paths, require_gpu
from gpu_model import QUICK, QWEN3_4B, add_places, checkpoint

SETTINGS = {"model.max_model_len": 8192, "kv_cache.memory_fraction": 0.8, "logging.progress": False}


def start(path: Path, others: bool) -> dict[str, Any]:
    """Open the model, answer one prompt, and then others; seconds of each part, and kernels compiled."""
    began = time.monotonic()
    from deepinfer_nvidia_sm100.warmup import cached_kernels

    from deepinfer_core import LLM, SamplingParams
    from deepinfer_core.api import Choice
    from deepinfer_core.engine import open_engine

    built: list[float] = []
    placed: list[float] = []
    build = open_engine.build_engine

    def timed(*arguments: Any, progress: Any, **named: Any) -> Any:
        def noted(name: str) -> None:
            placed.append(time.monotonic())
            progress(name)

        return build(*arguments, progress=noted, **named)

    def noted_operator(choice: Choice, op: Any) -> Any:
        built.append(time.monotonic())
        return op

    open_engine.build_engine = timed
    imported, kernels = time.monotonic(), cached_kernels().keys()
    config = {**SETTINGS, "plugins.paths": list(plugin_paths())}
    with LLM(path, accelerator="nvidia_sm100", config=config, wrap_op=noted_operator) as llm:
        opened = time.monotonic()
        llm.generate([[5] * 300], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        answered = time.monotonic()
        weights = placed[-1] - built[-1]
        found = {
            "import_s": imported - began,
            "weights_s": weights,
            "open_s": opened - imported,
            "first_token_s": answered - opened,
            "total_s": answered - began,
            "beside_weights_s": answered - began - weights,
            "kernels": len(cached_kernels().keys() - kernels),
        }
        if others:
            kernels = cached_kernels().keys()
            prompts = [[7] * n for n in (3, 17, 130, 511, 1025, 3000)]
            llm.generate(
                prompts, SamplingParams(temperature=0.7, top_p=0.8, top_k=50, seed=3, max_tokens=9, logprobs=2)
            )
            llm.generate(prompts[:3], SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.2, max_tokens=5))
            new = cached_kernels()
            found["kernels_of_other_requests"] = sorted(name for path, name in new.items() if path not in kernels)
    return found


def child(path: Path, cache: Path, *more: str) -> dict[str, Any]:
    """``start`` in a process with this cache, its own imports counted too."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    began = time.monotonic()
    command = [sys.executable, __file__, "--start", str(path), *more]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    spent = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": spent}


def warm(path: Path, cache: Path) -> dict[str, Any]:
    """``deepinfer warmup``, as a user runs it."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "deepinfer_core.cli", "warmup", str(path)]
    for name, value in SETTINGS.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    if plugin_paths():
        environ["DEEPINFER_PLUGINS__PATHS"] = ",".join(plugin_paths())
    began = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])
    return {"total_s": time.monotonic() - began, "says": done.stdout.strip().splitlines()[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_places(parser)
    parser.add_argument("--only", nargs="*", choices=("cold", "warmup"), default=["cold", "warmup"], help="a part")
    parser.add_argument("--quick", action="store_true", help="four layers")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    if options.start is not None:
        print(json.dumps(start(options.start, options.others)))
        return
    require_gpu("gpu_cold_start")
    results = Results(options.out / "gpu_cold_start.json", options.quick)
    path = checkpoint(options.checkpoint, QUICK if options.quick else QWEN3_4B)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        if "cold" in options.only:
            results.measure("empty cache", lambda: child(path, Path(first)))
            results.measure("again", lambda: child(path, Path(first)))
        if "warmup" in options.only:
            results.measure("warmup", lambda: warm(path, Path(second)))
            results.measure("after warmup", lambda: child(path, Path(second), "--others"))
    columns = ["beside_weights_s", "weights_s", "import_s", "first_token_s", "total_s", "kernels"]
    more = ["kernels_of_other_requests", "says"]
    rows = [[key, *(entry.get(c) for c in columns + more)] for key, entry in results.entries.items()]
    print_table(["start", *columns, *more], rows)
    finish(results.entries, options.json)


if __name__ == "__main__":
    sys.exit(main())
