"""Decoding speed of a small DeepSeek-V4 on the host, against transformers on the same weights.

    python benchmarks/v4_cpu.py [--quick] [--json] [--tokens 64] [--context 256] [--rounds 7]

Both continue the same random prompt greedily in float32, one request. Rounds alternate between the two, so that a
machine that others use disturbs both alike; each number is the median of its rounds, at the number of threads that
suits its engine best. A round decodes ``tokens`` and takes the time of the prompt out by a run of one token. Beside
the wall clock stands processor time, which counts the work even where other processes share the machine.
``calls`` is how many operators of torch one decoded token dispatches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish, machine, print_table, say
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

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

Run = Callable[[int], Any]


class CountCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts dispatched operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def random_model() -> Any:
    """Nothing is left at a constant that training would move: mixing matrices far from uniform take more rounds."""
    torch.manual_seed(0)
    config = DeepseekV4Config(**SHAPE)
    config._attn_implementation = "eager"
    model: Any = DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "tid2eid" in name:
                tensor.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(len(tensor))]))
            elif name.endswith("inv_freq"):
                continue
            elif tensor.dim() == 1 or "position_bias" in name:
                start = 1.0 if "norm" in name or "scale" in name else 0.0
                tensor.copy_(start + 0.5 * torch.randn_like(tensor))
    return model.eval()


def decode_times(run: Run, tokens: int) -> tuple[float, float]:
    """Seconds of one decoded token: by the wall clock, and of all threads of this process together."""
    marks = []
    for count in (1, 1 + tokens):
        wall, cpu = time.perf_counter(), time.process_time()
        run(count)
        marks.append((time.perf_counter() - wall, time.process_time() - cpu))
    (first_wall, first_cpu), (wall, cpu) = marks
    return (wall - first_wall) / tokens, (cpu - first_cpu) / tokens


def calls_per_token(run: Run) -> float:
    """Operators dispatched for one more token, a mean over 32 so that pooled windows close as often as they do."""
    counts = []
    for count in (4, 36):
        with CountCalls() as counter:
            run(count)
        counts.append(int(counter.calls))
    return (counts[1] - counts[0]) / 32


def measure(runs: dict[str, Run], tokens: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Medians for each engine, at the threads that give it the best wall clock."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, 2, cores} if cores > 1 else {1})
    times: dict[tuple[str, int], list[tuple[float, float]]] = {(n, t): [] for n in runs for t in counts}
    for run in runs.values():
        run(3)
    for number in range(rounds):
        for threads in counts:
            say(f"round {number + 1} of {rounds}, {threads} threads")
            torch.set_num_threads(threads)
            for name, run in runs.items():
                times[name, threads].append(decode_times(run, tokens))
    torch.set_num_threads(1)
    found = {}
    for name, run in runs.items():
        rows = [_row(threads, times[name, threads]) for threads in counts]
        best = max(rows, key=lambda row: row["tokens_per_s"])
        found[name] = {**best, "calls_per_token": calls_per_token(run), "by_threads": rows}
    return found


def _row(threads: int, times: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return {"threads": threads, "tokens_per_s": 1 / wall, "wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3}


def compare(options: argparse.Namespace, tokens: int, rounds: int) -> dict[str, Any]:
    model = random_model()
    prompt = torch.randint(0, SHAPE["vocab_size"], (1, options.context))
    result: dict[str, Any] = {
        "machine": machine(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": options.context,
        "tokens": tokens,
        "rounds": rounds,
    }
    settings: dict[str, Any] = {"kv_cache": {"block_size": 32, "prefix_cache": False}, "logging": {"progress": False}}
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with LLM(directory, **settings) as llm:

            def ours(count: int) -> list[int]:
                params = SamplingParams(max_tokens=count, temperature=0)
                prompts: Any = {"prompt_token_ids": prompt[0].tolist()}
                return list(llm.generate(prompts, params, progress=False)[0].outputs[0].token_ids)

            def theirs(count: int) -> list[int]:
                with torch.inference_mode():
                    text = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
                ids: list[int] = text[0, options.context :].tolist()
                return ids

            result["same_tokens"] = ours(16) == theirs(16)
            result |= measure({"deepinfer": ours, "transformers": theirs}, tokens, rounds)
    ours_, theirs_ = result["deepinfer"], result["transformers"]
    result["wall_ratio"] = ours_["tokens_per_s"] / theirs_["tokens_per_s"]
    result["cpu_ratio"] = min(r["cpu_ms"] for r in theirs_["by_threads"]) / min(
        r["cpu_ms"] for r in ours_["by_threads"]
    )
    result["load_average_after"] = os.getloadavg()[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds (16 and 3)")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--tokens", type=int, help="decoded tokens of a round (default 64)")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompt (default 256)")
    parser.add_argument("--rounds", type=int, help="rounds to take medians over (default 7)")
    options = parser.parse_args()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    result = compare(
        options, options.tokens or (16 if options.quick else 64), options.rounds or (3 if options.quick else 7)
    )
    columns = ("threads", "tokens_per_s", "wall_ms", "cpu_ms")
    rows = [
        (name, *(row[column] for column in columns), result[name]["calls_per_token"])
        for name in ("deepinfer", "transformers")
        for row in result[name]["by_threads"]
    ]
    print_table(("engine", "threads", "tokens/s", "wall ms", "cpu ms", "calls/token"), rows)
    load = (result["machine"]["load_average"], result["load_average_after"])
    print(f"{result['parameters']:,} parameters, same tokens: {result['same_tokens']}")
    print(f"load average {load[0]:.1f} before, {load[1]:.1f} after, on {result['machine']['cores']} cores")
    print(f"tokens/s {result['wall_ratio']:.2f}x, processor time {result['cpu_ratio']:.2f}x of transformers'")
    finish(result, options.json)


if __name__ == "__main__":
    main()
