"""The engine on a GPU with the NVIDIA backend: decode steps against the floor, prefill, and where the time goes.

The model has the shape of Qwen3-4B and random weights in bfloat16 (8.04 GB), made on the spot. The floor of a step is
the bytes it must read, weights and keys and values, over the copy bandwidth measured in the same run. Results are
written to ``--out`` as they come; what is there is not measured again.
``python benchmarks/gpu_engine.py --out results``; transformers beside it: ``gpu_transformers.py``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import finish, print_table, random_prompts
from gpu_common import Results, plugin_paths, require_gpu
from gpu_model import QUICK, QWEN3_4B, add_places, checkpoint, kv_bytes, weight_bytes

if TYPE_CHECKING:
    from deepinfer_core.api import Stream
    from deepinfer_core.engine.step_timing import StepTiming

BATCHES = (1, 8, 64, 256)
ONLY = ("decode", "prefill", "idle", "mixed", "steps", "profile")
PROMPT, STEPS = 512, 64
HELD_CYCLES = 12_000_000
"""Of the device's clock: some six milliseconds, more than the host takes to launch a recorded step."""
PARTS = {f"fused.{region}": ["parts"] for region in ("attention_inputs", "gated_linear", "between_attention")}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {"scheduling.async_scheduling": False},
    "graphs": {"scheduling.decode_graphs": False},
    "invariant": {"features.batch_invariant": True},
    "parts": {"ops": PARTS},
    "inputs": {"ops": {region: PARTS[region] for region in ("fused.gated_linear", "fused.between_attention")}},
    "norms": {"ops": {"fused.between_attention": ["parts"]}},
}
"""What ``--variants`` names: the loop not one step ahead, no recorded steps, batch invariance, no regions, only the
one before attention, norms as kernels of their own."""
MIXED = (64, 512, 64, 2048, 128, 4096, 256, 1024)
"""Lengths of prompts, over and over, where contexts are mixed."""


def decodes_all(step: StepTiming, lengths: Sequence[int]) -> bool:
    return step.tokens == len(lengths) and step.prefill == 0


class HeldStream:
    """Puts a wait on the device before each closure, and marks in time where its work begins and ends."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def submit(self, fn: Callable[[], Any]) -> Any:
        def held() -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(HELD_CYCLES)
            start.record()
            result = fn()
            end.record()
            self.spans.append((start, end))
            return result

        return self._stream.submit(held)

    def close(self) -> None:
        self._stream.close()


class Engine:
    """One LLM and the ways it is measured."""

    def __init__(self, path: Path, **settings: Any) -> None:
        from deepinfer_core import LLM

        config = {
            "kv_cache.prefix_cache": False,
            "kv_cache.memory_fraction": 0.8,
            "model.max_model_len": 8192,
            "logging.progress": False,
            "plugins.paths": list(plugin_paths()),
            **settings,
        }
        began = time.monotonic()
        self.llm = LLM(path, accelerator="nvidia_sm100", config=config)
        self.load_seconds = time.monotonic() - began

    def generate(self, lengths: Sequence[int], tokens: int) -> float:
        """Seconds for prompts of these lengths at once."""
        from deepinfer_core import SamplingParams

        vocab = self.llm.engine.planned.spec.vocab_size
        prompts = [random_prompts(1, n, seed=i + tokens, vocab_size=vocab)[0] for i, n in enumerate(lengths)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        torch.cuda.synchronize()
        began = time.monotonic()
        outputs = self.llm.generate(prompts, params)
        spent = time.monotonic() - began
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs), outputs[0]
        return spent

    def step_ms(self, lengths: Sequence[int]) -> dict[str, float]:
        """Milliseconds from result to result of steps in which every request decodes: median, and tokens of context."""
        self.generate(lengths, 4)
        tokens, timings = self._watched(lengths)
        whole = [(t.number, t.wait_end) for t in timings if decodes_all(t, lengths)]
        gaps = [b - a for (m, a), (n, b) in pairwise(whole) if n == m + 1]
        context = sum(lengths) / len(lengths) + tokens / 2
        return {"ms": statistics.median(gaps) * 1000, "steps": len(gaps), "context": context}

    def busy_ms(self, lengths: Sequence[int]) -> float:
        """Milliseconds that the device works on a decode step: every step is launched behind a wait on the device
        that is longer than launching takes, so that nothing between its first and last kernel waits for the host."""
        runner = self.llm.engine.core.runner
        held = HeldStream(runner.stream)
        runner.stream, before = held, runner.stream
        try:
            _, timings = self._watched(lengths)
        finally:
            runner.stream = before
        torch.cuda.synchronize()
        steps = zip(timings, held.spans, strict=True)  # one closure a step
        times = [start.elapsed_time(end) for t, (start, end) in steps if decodes_all(t, lengths)]
        return float(statistics.median(times))

    def _watched(self, lengths: Sequence[int]) -> tuple[int, list[StepTiming]]:
        """Generate so long that all requests decode together for a while: tokens of each, and every step."""
        tokens = STEPS + sum(lengths) // 2048  # the first requests decode while others' prompts run
        timings: list[StepTiming] = []
        observer = self.llm.engine.core.observer
        watcher = timings.append
        observer.watchers.append(watcher)
        self.generate(lengths, tokens)
        observer.watchers.remove(watcher)
        return tokens, timings

    def prefill(self, prompts: int, length: int) -> float:
        """Tokens a second of prompts alone."""
        lengths = [length] * prompts
        self.generate(lengths, 1)
        return prompts * length / min(self.generate(lengths, 1) for _ in range(3))

    def profile(self, batch: int, tokens: int = 24) -> dict[str, Any]:
        """Share of the time in which the device had nothing to do, and the kernels by time, while decoding."""
        from torch.profiler import ProfilerActivity, profile

        self.generate([64] * batch, 4)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.generate([64] * batch, tokens)
        kernels = sorted(
            (e.time_range.start, e.time_range.end, e.name)
            for e in found.events()
            if str(e.device_type) == "DeviceType.CUDA"
        )
        return idle_and_shares(kernels, tokens)

    def close(self) -> None:
        self.llm.close()
        gc.collect()
        torch.cuda.empty_cache()


def idle_and_shares(kernels: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Of ``(start, end, name)`` in microseconds: from the second third on, where only decoding is left."""
    if not kernels:
        return {"error": "the profiler saw no kernel"}
    first, last = kernels[0][0], max(end for _, end, _ in kernels)
    kernels = [k for k in kernels if k[0] >= first + (last - first) / 3]
    busy, reached = 0.0, kernels[0][0]
    by_name: dict[str, float] = {}
    times: dict[str, int] = {}
    for start, end, name in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        by_name[name] = by_name.get(name, 0.0) + end - start
        times[name] = times.get(name, 0) + 1
    span = reached - kernels[0][0]
    total = sum(by_name.values())
    top = sorted(by_name.items(), key=lambda item: -item[1])[:14]
    return {
        "idle": 1 - busy / span,
        "kernels_a_step": len(kernels) / (steps * 2 / 3),
        "shares": {name[:60]: round(spent / total, 4) for name, spent in top},
        "mean_us": {name[:60]: round(spent / times[name], 2) for name, spent in top},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_places(parser)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=ONLY,
        default=["decode", "prefill", "idle"],
        help="parts; mixed: contexts, steps: of up to 8,192 tokens",
    )
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=[], help="ways to set the engine up")
    parser.add_argument("--quick", action="store_true", help="four layers")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_engine")
    from deepinfer_nvidia_sm100.measure import copy_bandwidth, matrix_rate

    config = QUICK if options.quick else QWEN3_4B
    results = Results(options.out / "gpu_engine.json", options.quick)
    ceilings = results.measure("ceilings", lambda: {"copy": copy_bandwidth(), "bf16": matrix_rate()})
    print(f"copy {ceilings['copy'] / 1e9:,.0f} GB/s, bf16 {ceilings['bf16'] / 1e12:,.0f} TFLOP/s", flush=True)
    path = checkpoint(options.checkpoint, config)
    session = Session(results, config, path, ceilings, set(options.only))
    session.engine("", {})
    for variant in options.variants:
        session.engine(f" {variant}", VARIANTS[variant])
    if "steps" in options.only:
        for tokens in (2048, 8192):
            session.steps(tokens)
    print_table(
        ["", "ms a step", "floor", "share", "tokens/s"],
        [
            [key, e.get("ms"), e.get("floor_ms"), e.get("of_floor", e.get("of_matrix_rate", e.get("idle"))), rate(e)]
            for key, e in results.entries.items()
        ],
    )
    finish(results.entries, options.json)


def rate(entry: Mapping[str, Any]) -> Any:
    return entry.get("tokens_per_second")


class Session:
    """What is measured of which engine, and where it is written."""

    def __init__(
        self, results: Results, config: Mapping[str, Any], path: Path, ceilings: Mapping[str, float], only: set[str]
    ) -> None:
        self._results, self._config, self._path, self._ceilings, self._only = results, config, path, ceilings, only

    def take(self, key: str, fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = self._results.measure(key, fn)
        print(key, {k: v for k, v in found.items() if not isinstance(v, dict)}, flush=True)
        return found

    def engine(self, name: str, settings: Mapping[str, Any]) -> None:
        """Everything about one way to set an engine up; a variant of it at one, 8 and 64 requests only."""
        engine = Engine(self._path, **settings)
        self.take(f"load{name}", lambda: {"seconds": engine.load_seconds})
        batches = (1, 8, 64) if name else BATCHES
        if "decode" in self._only:
            for batch in batches:
                self.take(f"decode {batch}{name}", partial(self._decode, engine, [PROMPT] * batch))
        if "idle" in self._only and name in ("", " synchronous"):
            for batch in batches:
                self.take(f"idle {batch}{name}", partial(self._idle, engine, batch, f"decode {batch}{name}"))
        if "mixed" in self._only and not name:
            self.take("decode 64 mixed", partial(self._decode, engine, (MIXED * 8)[:64]))
        if "prefill" in self._only and not name:
            for prompts, length in ((1, 2048), (8, 2048), (64, 512)):
                self.take(f"prefill {prompts}x{length}", partial(self._prefill, engine, prompts, length))
        if "profile" in self._only and name in ("", " synchronous"):
            for batch in (1, 64):
                self.take(f"profile {batch}{name}", partial(engine.profile, batch))
        engine.close()

    def steps(self, tokens: int) -> None:
        """Prompts with more tokens a step."""
        engine = Engine(self._path, **{"scheduling.max_batch_tokens": tokens, "scheduling.max_running": 64})
        for prompts, length in ((8, 2048), (4, 8000)):
            key = f"prefill {prompts}x{length} steps of {tokens}"
            self.take(key, partial(self._prefill, engine, prompts, length))
        engine.close()

    def _decode(self, engine: Engine, lengths: Sequence[int]) -> dict[str, Any]:
        found = engine.step_ms(lengths)
        cached = kv_bytes(self._config, len(lengths) * found["context"])
        floor = (weight_bytes(self._config) + cached) / self._ceilings["copy"] * 1000
        return {**found, "floor_ms": floor, "of_floor": floor / found["ms"]}

    def _idle(self, engine: Engine, batch: int, decode: str) -> dict[str, Any]:
        """Share of a decode step in which the device does nothing."""
        busy = engine.busy_ms([PROMPT] * batch)
        return {"busy_ms": busy, "idle": 1 - busy / self._results.entries[decode]["ms"]}

    def _prefill(self, engine: Engine, prompts: int, length: int) -> dict[str, Any]:
        """Tokens a second, and their operations over cuBLAS's rate: weights, and half the square of attention."""
        config = self._config
        speed = engine.prefill(prompts, length)
        attention = 2 * length * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
        head = 2 * config["vocab_size"] * config["hidden_size"] * (1 - 1 / length)  # one row of logits a prompt
        each = weight_bytes(config) - head + attention
        return {"tokens_per_second": speed, "of_matrix_rate": speed * each / self._ceilings["bf16"]}


if __name__ == "__main__":
    sys.exit(main())
