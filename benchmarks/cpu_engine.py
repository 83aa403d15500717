"""The engine on a processor, beside other engines: decode steps, ragged load, the demo model, the prefix cache.

    python benchmarks/cpu_engine.py [--quick] [--json] [--only decode,ragged,demo,prefix] [--threads N]

Decode: a random Qwen3 of 41.6 million parameters in float32, prompts of 256 ids, greedy, end of sequence ignored; the
time of a step is (time for N tokens - time for 1) / (N - 1). Engines alternate within each round; medians over rounds.
Ragged: prompts of 16 to 512 ids, outputs of 8 to 256, arriving by a Poisson process faster than they are served;
``generate`` takes them in order of arrival, eight at a time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peers
import torch
from common import finish, machine, print_table, random_prompts, random_qwen3

PARTS = ("decode", "ragged", "demo", "prefix")
PROMPT = 256
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a bicycle stays upright.",
    "List three uses of copper.",
)


def decode(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per decode step of each engine at each batch size, and whether all say the same."""
    new_tokens, rounds = (16, 2) if options.quick else (64, 5)
    engines = [peers.deepinfer(directory), peers.transformers_generate(directory)]
    gguf_file = peers.write_gguf(directory, directory.parent / "model.gguf")
    for peer in (peers.llama_cpp(gguf_file, options.threads), peers.vllm(directory)):
        if peer is not None:
            engines.append(peer)
    result: dict[str, Any] = {"not_installed": [n for n in ("llama_cpp", "vllm") if not _installed(n)]}
    rows = []
    for batch in (1, 8) if options.quick else (1, 8, 32):
        prompts = random_prompts(batch, PROMPT)
        times: dict[str, list[float]] = {}
        first: dict[str, list[int]] = {}
        able = [engine for engine in engines if batch == 1 or engine.batches]
        for number in range(rounds + 1):
            for engine in able:
                one = engine.run(prompts, 1)[0]
                whole, ids = engine.run(prompts, new_tokens)
                first[engine.name] = ids[0][:8]
                if number:  # the first round warms up
                    times.setdefault(engine.name, []).append(1e3 * (whole - one) / (new_tokens - 1))
        ours = statistics.median(times[engines[0].name])
        for engine in able:
            median = statistics.median(times[engine.name])
            rows.append((batch, engine.name, median, min(times[engine.name]), ours / median))
        result[f"batch_{batch}"] = {
            "ms_per_step": {name: statistics.median(values) for name, values in times.items()},
            "same_first_ids": len({tuple(ids) for ids in first.values()}) == 1,
        }
    print_table(("batch", "engine", "ms/step median", "minimum", "ours / theirs"), rows)
    return result


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
    theirs = peers.transformers_generate(directory)
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
            assert output.metrics.cached_tokens >= length - 16
    cold, hit = statistics.median(colds), statistics.median(hits)
    print_table(("prompt", "cold TTFT s", "cached TTFT s", "ratio"), [(length, cold, hit, cold / hit)])
    return {"prompt": length, "cold_seconds": cold, "cached_seconds": hit, "ratio": cold / hit}


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller loads and fewer rounds")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of every engine")
    options = parser.parse_args()
    parts = options.only.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--only {options.only}: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": machine(), "threads": options.threads, "quick": options.quick}
    print("  ".join(f"{name}: {value}" for name, value in result["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = random_qwen3(Path(folder) / "qwen3")
        if "decode" in parts:
            result["decode"] = decode(directory, options)
        if "ragged" in parts:
            result["ragged"] = ragged(directory, options)
        if "demo" in parts:
            result["demo"] = demo(options)
        if "prefix" in parts:
            result["prefix"] = prefix(directory, options)
    finish(result, options.json)


if __name__ == "__main__":
    main()
