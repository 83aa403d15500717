"""Decoding speed of a small DeepSeek-V4 on the host, against transformers on the same weights.

    python benchmarks/v4_cpu.py [--tokens 64] [--context 256] [--repeat 3] [--json FILE]

Both decode greedily from the same random prompt in float32, each with every number of threads, and keep their best.
``calls`` is how many operators of torch one decoded token dispatches. Run it on an idle machine: the load average is
printed beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from deepinfer_core import LLM, SamplingParams

CSA, HCA, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "layer_types": [SLIDING, SLIDING, CSA, HCA, CSA, HCA, CSA, HCA],
    "compress_rates": {CSA: 4, HCA: 32},
    "mlp_layer_types": ["hash_moe", "hash_moe", *["moe"] * 6],
    "sliding_window": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 32,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "eos_token_id": None,
}
"""About 12 million parameters with all kinds of layers."""


class CountCalls(TorchDispatchMode):
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def random_model() -> Any:
    torch.manual_seed(0)
    config = DeepseekV4Config(**SHAPE)
    config._attn_implementation = "eager"
    model: Any = DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.named_buffers():
            if "tid2eid" in name:
                tensor.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(len(tensor))]))
    return model.eval()


def measure(run: Callable[[int], Any], tokens: int, repeat: int) -> dict[str, float]:
    """Tokens per second of decoding, prefill taken out by a run of one token; and calls per token."""
    run(2)
    rates = []
    for _ in range(repeat):
        started = time.perf_counter()
        run(1)
        first = time.perf_counter()
        run(tokens)
        rates.append((tokens - 1) / (time.perf_counter() - first - (first - started)))
    counts = []
    for count in (4, 12):
        with CountCalls() as counter:
            run(count)
        counts.append(counter.calls)
    return {"tokens_per_s": max(rates), "calls_per_token": (counts[1] - counts[0]) / 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    model = random_model()
    prompt = torch.randint(0, SHAPE["vocab_size"], (1, options.context))
    results: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        settings: dict[str, Any] = {"kv_cache": {"block_size": 32, "prefix_cache": False}}
        with LLM(directory, logging={"progress": False}, **settings) as llm:

            def ours(count: int) -> Any:
                params = SamplingParams(max_tokens=count, temperature=0)
                return llm.generate({"prompt_token_ids": prompt[0].tolist()}, params, progress=False)

            def theirs(count: int) -> Any:
                with torch.inference_mode():
                    return model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)

            same = ours(16)[0].outputs[0].token_ids == theirs(16)[0, options.context :].tolist()
            for name, run in (("deepinfer", ours), ("transformers", theirs)):
                for threads in range(1, (os.cpu_count() or 1) + 1):
                    torch.set_num_threads(threads)
                    found = measure(run, options.tokens, options.repeat) | {"threads": threads}
                    if found["tokens_per_s"] > results.get(name, {"tokens_per_s": 0})["tokens_per_s"]:
                        results[name] = found
    results["same_tokens"] = same
    results["ratio"] = results["deepinfer"]["tokens_per_s"] / results["transformers"]["tokens_per_s"]
    for name, value in results.items():
        print(f"{name:13} {value}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
