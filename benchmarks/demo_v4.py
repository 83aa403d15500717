"""Decoding speed of the demo model demo-v4: one request, one thread, after a prompt of held-out text.

    python benchmarks/demo_v4.py [--quick] [--json] [--tokens 64] [--context 512] [--rounds 7] [--set KEY=VALUE]

A round takes the time for one token and for ``tokens`` more, so that the prompt is out; rounds alternate between
float32 and bfloat16, and each number is the median of its rounds. ``--set`` gives further settings, as on the program's
command line: another provider of an operator, for example.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from common import finish, machine, print_table
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.held_out import held_out_texts
from tokenizers import Tokenizer

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.config import load_config

DTYPES = ("float32", "bfloat16")


def prompt_of(context: int) -> list[int]:
    """The beginning of a held-out file of the standard library."""
    text = held_out_texts()["stdlib/doctest.py"]
    ids = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(text).ids
    return list(ids[:context])


def seconds(llm: LLM, prompt: list[int], count: int) -> float:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    prompts: Any = {"prompt_token_ids": prompt}
    began = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - began


def measure(options: argparse.Namespace, tokens: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    prompt = prompt_of(options.context)
    result: dict[str, Any] = {"machine": machine(), "context": len(prompt), "tokens": tokens, "rounds": rounds}
    with ExitStack() as stack:
        llms = {}
        for dtype in DTYPES:
            overrides = {"model.dtype": dtype, "kv_cache.prefix_cache": False, "logging.progress": False}
            config = load_config(overrides=overrides, sets=options.settings)
            llms[dtype] = stack.enter_context(LLM("demo-v4", config=config))
        times: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
        for llm in llms.values():
            seconds(llm, prompt, 3)
        for _ in range(rounds):
            for dtype, llm in llms.items():
                first = seconds(llm, prompt, 1)
                times[dtype].append((first, (seconds(llm, prompt, 1 + tokens) - first) / tokens))
    for dtype, rows in times.items():
        first, step = (statistics.median(column) for column in zip(*rows, strict=True))
        prefill = len(prompt) / first
        result[dtype] = {"tokens_per_s": 1 / step, "ms_per_token": step * 1e3, "prompt_tokens_per_s": prefill}
    result["load_average_after"] = os.getloadavg()[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds (16 and 3)")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--tokens", type=int, help="decoded tokens of a round (default 64)")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompt (default 512)")
    parser.add_argument("--rounds", type=int, help="rounds to take medians over (default 7)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    options = parser.parse_args()
    tokens, rounds = options.tokens or (16 if options.quick else 64), options.rounds or (3 if options.quick else 7)
    result = measure(options, tokens, rounds)
    columns = ("tokens_per_s", "ms_per_token", "prompt_tokens_per_s")
    rows = [(dtype, *(result[dtype][column] for column in columns)) for dtype in DTYPES]
    print_table(("dtype", "tokens/s", "ms/token", "prompt tokens/s"), rows)
    load = (result["machine"]["load_average"], result["load_average_after"])
    print(f"context {result['context']}, one thread; load average {load[0]:.1f} before, {load[1]:.1f} after")
    finish(result, options.json)


if __name__ == "__main__":
    main()
