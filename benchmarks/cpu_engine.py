"""The engine on a processor, beside other engines: decode steps, ragged load, the demo model, the prefix cache.

    python benchmarks/cpu_engine.py [--quick] [--json] [--only decode,ragged,demo,prefix] [--threads N]
        [--thread-counts 1,2] [--avx2] [--vllm-python PATH] [--llama-python PATH]

Decode: a random Qwen3 of 41.6 million parameters in float32, prompts of 256 ids, greedy, end of sequence ignored; the
time of a step is (time for N tokens - time for 1) / (N - 1). Each engine runs in a process of its own, once per thread
count, and the best is kept; they alternate within each round; medians over rounds. vLLM pins its own torch, so it has
an environment of its own, named by ``--vllm-python``. ``weights alone`` is no engine: it multiplies by every weight
once a step and does nothing else, which at batch 1 is the floor that memory sets.
Ragged: prompts of 16 to 512 ids, outputs of 8 to 256, arriving by a Poisson process faster than they are served;
``generate`` takes them in order of arrival, eight at a time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from common import finish, machine, print_table, random_prompts, random_qwen3, say, settled, step_seconds
from peer_process import Remote, installed

PARTS = ("decode", "ragged", "demo", "prefix")
PROMPT = 256
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL",
}
"""What keeps each library from 512-bit vectors; the engines' processes inherit it."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List three uses of copper.",
)


def decode(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per decode step of each engine, at its best number of threads, and whether all say the same."""
    new_tokens, rounds = (16, 2) if options.quick else (64, 5)
    gguf_file = peers.write_gguf(directory, directory.parent / "model.gguf")
    engines: list[Remote] = []
    missing = []
    for name, module, model, python in (
        ("deepinfer", "deepinfer_core", directory, sys.executable),
        ("transformers", "transformers", directory, sys.executable),
        ("llama.cpp", "llama_cpp", gguf_file, options.llama_python),
        ("vllm", "vllm", directory, options.vllm_python),
        ("weights", "torch", directory, sys.executable),
    ):
        if installed(python, module):
            engines += [Remote(name, model, python, threads) for threads in options.thread_counts]
        else:
            missing.append(name)
    result: dict[str, Any] = {"not_installed": missing}
    rows: list[tuple[Any, ...]] = []
    for batch in (1, 8) if options.quick else (1, 8, 32):
        able = [e for e in engines if batch == 1 or e.engine != "llama.cpp"]
        result[f"batch_{batch}"], table = _decode_batch(able, batch, new_tokens, rounds)
        rows += table
    for engine in engines:
        engine.close()
    print_table(("batch", "engine", "threads", "ms/step median", "minimum", "ours / theirs"), rows)
    return result


def _decode_batch(
    engines: list[Remote], batch: int, new_tokens: int, rounds: int
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """One batch size: engines alternate within a round, the first round warms up; each engine's best thread count."""
    prompts = random_prompts(batch, PROMPT)
    times: dict[tuple[str, int], list[float]] = {}
    first = set()
    for number in range(rounds + 1):
        say(f"decode, batch {batch}, round {number} of {rounds}")
        for engine in engines:
            one = engine.run(prompts, 1)[0]
            whole, ids = engine.run(prompts, new_tokens)
            first.update(tuple(said[:8]) for said in ids[:1])
            if number:
                step = 1e3 * step_seconds(whole, one, new_tokens)
                times.setdefault((engine.name, engine.threads), []).append(step)
    times = {key: settled(values, f"batch {batch}, {key[0]} x{key[1]}") for key, values in times.items()}
    best: dict[str, tuple[float, int]] = {}
    for (name, threads), values in times.items():
        best[name] = min(best.get(name, (math.inf, 0)), (statistics.median(values), threads))
    ours = best[engines[0].name][0]
    rows = [
        (batch, name, threads, median, min(times[name, threads]), ours / median)
        for name, (median, threads) in best.items()
    ]
    facts = {
        "ms_per_step": {name: median for name, (median, _) in best.items()},
        "threads": {name: threads for name, (_, threads) in best.items()},
        "all": {f"{name} x{threads}": statistics.median(values) for (name, threads), values in times.items()},
        "same_first_ids": len(first) == 1,
    }
    return facts, rows


def ragged(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second over a mixed load."""
    from deepinfer_core import LLM, SamplingParams

    count = 8 if options.quick else 32
    source = random.Random(7)
    loads = [(source.randint(16, 512), source.randint(8, 256)) for _ in range(count)]
    arrivals, now = [], 0.0
    for _ in loads:
        now += source.expovariate(20.0)
        arrivals.append(now)
    prompts = [random_prompts(1, n, seed=i)[0] for i, (n, _) in enumerate(loads)]
    total = sum(new for _, new in loads)
    theirs = peers.transformers_generate(peers.transformers_model(directory))
    rates: dict[str, list[float]] = {"deepinfer": [], "transformers": []}
    with LLM(directory, accelerator="cpu", config={"logging.progress": False, "kv_cache.prefix_cache": False}) as llm:
        for _ in range(1 if options.quick else 3):
            rates["deepinfer"].append(total / _serve(llm, prompts, loads, arrivals, SamplingParams))
            start = time.perf_counter()
            for first in range(0, count, 8):
                _wait_until(start + arrivals[min(first + 7, count - 1)])
                theirs.run(prompts[first : first + 8], max(new for _, new in loads[first : first + 8]))
            rates["transformers"].append(total / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["deepinfer"] / medians["transformers"]
    print_table(("engine", "output tokens/s"), [*medians.items(), ("ratio", ratio)])
    return {"tokens_per_second": medians, "ratio": ratio}


def _serve(llm: Any, prompts: Any, loads: Any, arrivals: list[float], params: Any) -> float:
    """Seconds from the first arrival to the last token, requests entering as they arrive."""
    core, pending = llm.engine.core, list(range(len(prompts)))
    start = time.perf_counter()
    while pending or core.has_unfinished:
        while pending and arrivals[pending[0]] <= time.perf_counter() - start:
            index = pending.pop(0)
            sampling = params(temperature=0, max_tokens=loads[index][1], ignore_eos=True)
            core.add(llm._requests([prompts[index]], [sampling], stream=False))
        if core.has_unfinished:
            core.step()
        elif pending:
            _wait_until(start + arrivals[pending[0]])
    return time.perf_counter() - start


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def demo(options: argparse.Namespace) -> dict[str, Any]:
    """The demo model, one request at a time, in float32 and with 8-bit weights: speed, and what 8 bits cost."""
    from deepinfer_core import LLM, SamplingParams

    tokens = 32 if options.quick else 128
    question = [{"role": "user", "content": "Explain how rain forms, in detail."}]
    rows, result = [], {}
    greedy: dict[str, list[list[int]]] = {}
    for name, ops in (("float32", {}), ("8-bit weights", {"gemm.linear": ["cpu:int8_weight_only", "cpu"]})):
        start = time.perf_counter()
        with LLM("demo", accelerator="cpu", config={"logging.progress": False, "ops": ops}) as llm:
            ready = time.perf_counter() - start
            rates = []
            for _ in range(2 if options.quick else 4):
                output = llm.chat(question, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))[0]
                metrics = output.metrics
                assert metrics.first_token is not None
                assert metrics.finished is not None
                rates.append((tokens - 1) / (metrics.finished - metrics.first_token))
            greedy[name] = greedy_answers(llm)
            result[name] = {
                "tokens_per_second": statistics.median(rates),
                "ready_seconds": ready,
                "perplexity": perplexity(llm),
                "same_greedy_tokens": agreement(greedy[name], greedy["float32"]),
            }
            rows.append((name, statistics.median(rates), max(rates), ready, *list(result[name].values())[2:]))
    print_table(("demo model", "tokens/s median", "best", "ready in s", "perplexity", "same greedy tokens"), rows)
    return result


def perplexity(llm: Any) -> float:
    """Of the held-out text beside this file: exp of the mean negative log-probability of its tokens."""
    from deepinfer_core import SamplingParams

    ids = llm.tokenizer.encode(Path(__file__).with_name("held_text.txt").read_text(encoding="utf-8"))
    output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), progress=False)[0]
    found = [entries[token].logprob for entries, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    return math.exp(-statistics.fmean(found))


def greedy_answers(llm: Any) -> list[list[int]]:
    from deepinfer_core import SamplingParams

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [o.outputs[0].token_ids for o in llm.chat(chats, SamplingParams(temperature=0, max_tokens=64))]


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of tokens before the first difference, over all answers."""
    same = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        total += len(theirs)
        pairs = zip(ours, theirs, strict=False)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return same / total


def prefix(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of a long prompt, cold and found in the prefix cache."""
    from deepinfer_core import LLM, SamplingParams

    length = 2032 if options.quick else 8128
    colds: list[float] = []
    hits: list[float] = []
    with LLM(directory, accelerator="cpu", config={"logging.progress": False, "scheduling.max_running": 8}) as llm:
        for seed in range(2 if options.quick else 3):
            prompt = random_prompts(1, length, seed=seed)
            for times in (colds, hits):
                output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))[0]
                times.append(output.metrics.ttft or 0.0)
            assert output.metrics.cached_tokens > length - llm.engine.planned.config.kv_cache.block_size - 1
    cold, hit = statistics.median(colds), statistics.median(hits)
    print_table(("prompt", "cold TTFT s", "cached TTFT s", "ratio"), [(length, cold, hit, cold / hit)])
    return {"prompt": length, "cold_seconds": cold, "cached_seconds": hit, "ratio": cold / hit}


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller loads and fewer rounds")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads of the engines in this process"
    )
    parser.add_argument("--thread-counts", type=_counts, help="decode: numbers tried, best kept (1,2; with --quick 1)")
    parser.add_argument(
        "--avx2",
        action="store_true",
        help="decode: as on a processor without 512-bit vectors; llama.cpp is as it was compiled, so name one that was "
        "compiled with -DGGML_NATIVE=OFF -DGGML_AVX2=ON by --llama-python",
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM, if not this one")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    options = parser.parse_args()
    options.thread_counts = options.thread_counts or ([1] if options.quick else [1, 2])
    parts = options.only.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--only {options.only}: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    if options.avx2:
        os.environ.update(AVX2)
    result: dict[str, Any] = {
        "machine": machine(),
        "threads": options.threads,
        "quick": options.quick,
        "avx2": options.avx2,
    }
    print("  ".join(f"{name}: {value}" for name, value in result["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = random_qwen3(Path(folder) / "qwen3")
        if "decode" in parts:
            result["decode"] = decode(directory, options)
        if "ragged" in parts:
            say("ragged")
            result["ragged"] = ragged(directory, options)
        if "demo" in parts:
            say("demo")
            result["demo"] = demo(options)
        if "prefix" in parts:
            say("prefix cache")
            result["prefix"] = prefix(directory, options)
    finish(result, options.json)


if __name__ == "__main__":
    main()
