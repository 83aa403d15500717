"""The engine on a GPU with the NVIDIA backend: decode steps against the floor, prefill, and where the time goes.

The model has the shape of Qwen3-4B and random weights in bfloat16 (8.04 GB), made on the spot. The floor of a step is
the bytes it must read, weights and keys and values, over the copy bandwidth measured in the same run. Results are
written to ``--out`` as they come; what is there is not measured again.
``python benchmarks/gpu_engine.py --out results``; ``--transformers`` for its ``generate`` beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import QWEN3, finish, print_table, random_prompts
from gpu_common import Results, plugin_paths
from safetensors.torch import save_file

if TYPE_CHECKING:
    from deepinfer_core.engine.step_timing import StepTiming

QWEN3_4B: Mapping[str, Any] = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
QUICK: Mapping[str, Any] = {**QWEN3_4B, "num_hidden_layers": 4, "vocab_size": 32000}
BATCHES = (1, 8, 64, 256)
PROMPT, STEPS = 512, 64


def checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Random weights as training begins, made on the GPU and saved unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    if file.exists():
        return folder
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * 0.02).to(torch.bfloat16).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_proj", (query, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, query)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", dim),
            ("self_attn.k_norm", dim),
        ):
            tensors[f"{prefix}{name}.weight"] = ones(size)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Read by a decode step: every matrix, the tied embedding as the output head."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
    return 2 * int(config["num_hidden_layers"] * layer + config["vocab_size"] * hidden)


def kv_bytes(config: Mapping[str, Any], tokens: float) -> float:
    """Keys and values of this many tokens, in every layer."""
    return float(4 * tokens * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])


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

    def generate(self, batch: int, prompt: int, tokens: int) -> float:
        """Seconds for this many requests at once."""
        from deepinfer_core import SamplingParams

        vocab = self.llm.engine.planned.spec.vocab_size
        prompts = random_prompts(batch, prompt, seed=batch + tokens, vocab_size=vocab)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        torch.cuda.synchronize()
        began = time.monotonic()
        outputs = self.llm.generate(prompts, params)
        spent = time.monotonic() - began
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs), outputs[0]
        return spent

    def step_ms(self, batch: int) -> dict[str, float]:
        """Milliseconds from result to result of steps in which every request decodes: median, and tokens of context."""
        self.generate(batch, PROMPT, 4)
        tokens = STEPS + batch * PROMPT // 2048  # the first requests decode while others' prompts run
        timings: list[StepTiming] = []
        observer = self.llm.engine.core.observer
        watcher = timings.append
        observer.watchers.append(watcher)
        self.generate(batch, PROMPT, tokens)
        observer.watchers.remove(watcher)
        whole = [(t.number, t.wait_end) for t in timings if t.tokens == batch and t.prefill == 0]
        gaps = [b - a for (m, a), (n, b) in pairwise(whole) if n == m + 1]
        return {"ms": statistics.median(gaps) * 1000, "steps": len(gaps), "context": PROMPT + tokens / 2}

    def prefill(self, prompts: int, length: int) -> float:
        """Tokens a second of prompts alone."""
        self.generate(prompts, length, 1)
        return prompts * length / min(self.generate(prompts, length, 1) for _ in range(3))

    def profile(self, batch: int, tokens: int = 24) -> dict[str, Any]:
        """Share of the time in which the device had nothing to do, and the kernels by time, while decoding."""
        from torch.profiler import ProfilerActivity, profile

        self.generate(batch, 64, 4)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.generate(batch, 64, tokens)
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


def transformers_ms(path: Path, batch: int) -> dict[str, Any]:
    """``generate`` with its defaults."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cuda")
    vocab = model.config.vocab_size
    ids = torch.tensor(random_prompts(batch, PROMPT, vocab_size=vocab), device="cuda")

    def run(model: Any, tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.monotonic()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        torch.cuda.synchronize()
        return time.monotonic() - began

    run(model, 2)
    result = {"ms": (run(model, 34) - run(model, 2)) / 32 * 1000}
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("/dev/shm/qwen3-4b-random"), help="where the model goes"
    )
    parser.add_argument("--transformers", action="store_true", help="its generate beside")
    parser.add_argument("--profile", action="store_true", help="idle share and kernels by time")
    parser.add_argument("--variants", action="store_true", help="without graphs, synchronous, batch-invariant")
    parser.add_argument("--quick", action="store_true", help="four layers")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_engine: torch sees no GPU on this machine; nothing was measured")
        finish({"skipped": "no GPU"}, options.json)
        return
    from deepinfer_nvidia_sm100.measure import copy_bandwidth, matrix_rate

    config = QUICK if options.quick else QWEN3_4B
    results = Results(options.out / "gpu_engine.json")
    ceilings = results.measure("ceilings", lambda: {"copy": copy_bandwidth(), "bf16": matrix_rate()})
    print(f"copy {ceilings['copy'] / 1e9:,.0f} GB/s, bf16 {ceilings['bf16'] / 1e12:,.0f} TFLOP/s", flush=True)
    path = checkpoint(options.checkpoint, config)
    variants: dict[str, dict[str, Any]] = {"": {}}
    if options.variants:
        variants |= {
            " synchronous": {"scheduling.async_scheduling": False},
            " without graphs": {"scheduling.decode_graphs": False},
            " batch-invariant": {"features.batch_invariant": True},
        }
    rows: list[list[Any]] = []
    for variant, settings in variants.items():
        engine = Engine(path, **settings)
        results.measure(f"load{variant}", lambda e=engine: {"seconds": e.load_seconds})
        for batch in (1, 64) if variant else BATCHES:
            key = f"decode {batch}{variant}"
            found = results.measure(key, lambda b=batch, e=engine: decode_share(e, config, b, ceilings["copy"]))
            rows.append([key, found.get("ms"), found.get("floor_ms"), found.get("of_floor")])
            print(rows[-1], flush=True)
        if not variant:
            for prompts, length in ((1, 2048), (8, 2048), (64, 512)):
                key = f"prefill {prompts}x{length}"
                found = results.measure(
                    key, lambda p=prompts, n=length, e=engine: prefill_share(e, config, p, n, ceilings["bf16"])
                )
                rows.append([key, None, None, found.get("of_matrix_rate"), found.get("tokens_per_second")])
                print(rows[-1], flush=True)
        if options.profile and variant in ("", " synchronous"):
            for batch in (1, 64):
                found = results.measure(f"profile {batch}{variant}", lambda b=batch, e=engine: e.profile(b))
                print(f"profile {batch}{variant}", json.dumps(found, indent=1), flush=True)
        engine.close()
        del engine
    if options.transformers:
        for batch in (1, 8):
            found = results.measure(f"transformers {batch}", lambda b=batch: transformers_ms(path, b))
            rows.append([f"transformers {batch}", found.get("ms"), None, None])
    width = max(len(row) for row in rows)
    header = ["", "ms a step", "floor", "of floor or of matrix rate", "tokens/s"][:width]
    print_table(header, [row + [None] * (width - len(row)) for row in rows])
    finish(results.entries, options.json)


def decode_share(engine: Engine, config: Mapping[str, Any], batch: int, bandwidth: float) -> dict[str, Any]:
    found = engine.step_ms(batch)
    floor = (weight_bytes(config) + kv_bytes(config, batch * found["context"])) / bandwidth * 1000
    return {**found, "floor_ms": floor, "of_floor": floor / found["ms"]}


def prefill_share(engine: Engine, config: Mapping[str, Any], prompts: int, length: int, rate: float) -> dict[str, Any]:
    """Tokens a second, and their operations over cuBLAS's rate: weights, and half the square of attention."""
    speed = engine.prefill(prompts, length)
    attention = 2 * length * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    head = 2 * config["vocab_size"] * config["hidden_size"] * (1 - 1 / length)  # one row of logits a prompt
    each = weight_bytes(config) - head + attention
    return {"tokens_per_second": speed, "of_matrix_rate": speed * each / rate}


if __name__ == "__main__":
    sys.exit(main())
