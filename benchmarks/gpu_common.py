"""What the GPU benchmarks share: the backend's plugin, operators built as an engine builds them, results on disk."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepinfer_core.api import BuildContext, LazyRef, OpRequest

PLUGIN = "deepinfer_nvidia_sm100.plugin"


def plugin_paths() -> tuple[str, ...]:
    """The plugin's module where its distribution is not installed, only importable."""
    found = importlib.metadata.entry_points(group="deepinfer.plugins.v1")
    return () if any(entry.value == PLUGIN for entry in found) else (PLUGIN,)


NO_GPU = 3
"""Exit code of a benchmark that needs a GPU on a machine without one; ``make bench`` goes on after it."""


def require_gpu(name: str) -> None:
    """End the program, in one line, where torch sees no GPU."""
    if not torch.cuda.is_available():
        print(f"{name}: needs a GPU, and torch {torch.__version__} sees none; nothing was measured", file=sys.stderr)
        sys.exit(NO_GPU)


class Results:
    """One JSON file, written after each entry. What is there already is not measured again.

    ``quick``: of a smaller model, whose results have a file of their own: their keys are those of the whole one's.
    """

    def __init__(self, path: Path, quick: bool = False) -> None:
        path = path.with_stem(f"{path.stem}_quick") if quick else path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, key: str, fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The entry, measured if need be. A failure is an entry too, and is tried again next time."""
        if key not in self.entries or "error" in self.entries[key]:
            try:
                self.entries[key] = fn()
            except Exception as error:
                traceback.print_exc()
                self.entries[key] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            self._path.write_text(json.dumps(self.entries, indent=1))
        entry: dict[str, Any] = self.entries[key]
        return entry


def build(request: OpRequest, name: str | None = None, max_model_len: int = 131072) -> Any:
    """The operator that an engine would get on this machine, or the backend's provider called ``name``."""
    from deepinfer_core.plugins import choose, choose_device, load_plugins

    registry = load_plugins(files=plugin_paths())
    chosen = choose_device(registry, "nvidia_sm100", dict(os.environ))
    hooks = ("attention", "fused", "gemm", "pointwise", "sampling", "runner_ops", "kv_layout")
    providers = [item for hook in hooks for item in registry.collect(f"deepinfer_{hook}", device=chosen.device)]
    user = {} if name is None else {request.op: [f"nvidia_sm100:{name}"]}
    (choice,) = choose({"op": request}, providers, user=user, fallback="allow", backend_plugin=chosen.plugin)
    provider = next(p for plugin, p in providers if f"{plugin}:{p.name}" == choice.provider and p.op == request.op)

    def reference(wanted: OpRequest) -> Any:
        found = next(p for _, p in providers if p.fallback and p.op == wanted.op and p.supports(wanted))
        assert isinstance(found.build, LazyRef)
        return found.build.load()(wanted, context)

    context = BuildContext(
        device=torch.device("cuda", 0),
        max_tokens=2048,
        max_requests=256,
        max_model_len=max_model_len,
        num_threads=1,
        settings=None,
        reference=reference,
    )
    assert isinstance(provider.build, LazyRef)
    return provider.build.load()(request, context)


@contextmanager
def compiling() -> Iterator[None]:
    """Launches inside compile, in threads, and do not run."""
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def compile_all(calls: Iterable[Callable[[], object]]) -> None:
    """Compile what these calls launch, many at a time; a call that fails is left to fail when it is measured."""
    with compiling():
        for call in calls:
            try:
                call()
            except Exception:
                traceback.print_exc()
