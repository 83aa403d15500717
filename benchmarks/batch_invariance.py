"""What batch invariance costs on a processor: the same engine with ``features.batch_invariant`` off and on.

    python benchmarks/batch_invariance.py [--quick] [--json] [--model PATH] [--threads N] [--rounds N]

Two engines stand side by side and take turns within each round; medians over rounds, the first round being warm-up.
Decode: batches of 1, 8 and 32 prompts, greedy, end of sequence ignored; the time of a step is (time for N tokens - time
for 1) / (N - 1). Prefill: one prompt, its time to one token. The model is a random Qwen3 of 41.6 million parameters
in float32 unless ``--model`` names another. Run it on an idle machine.

The operator overrides of thinking-machines' ``batch_invariant_ops`` replace operators of accelerators only: there is
nothing of theirs to run on a processor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET = 1.25
"""Longest time on a processor against the default's, in prefill and from 8 requests on."""

MODES = {"default": False, "invariant": True}
DECODE_PROMPT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--model", help="checkpoint in place of the random one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0, help="0: 2 with --quick, 7 without")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)

    from common import finish, machine, print_table, random_qwen3

    facts = {"machine": machine(), "threads": options.threads, "command": " ".join(sys.argv)}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(random_qwen3(Path(folder) / "qwen3"))
        rows = measure(model, options)
    print(f"{facts['machine']}, {options.threads} threads, model {options.model or 'random Qwen3'}")
    header = ("what", "default tokens/s", "invariant tokens/s", "time ratio", "lowest", "highest", "target")
    print_table(header, [(r["what"], *(r[name] for name in MODES), *r["ratio"], r["target"]) for r in rows])
    finish({**facts, "rows": rows}, options.json)


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each load."""
    from deepinfer_core import LLM

    settings = {"logging.progress": False, "kv_cache.prefix_cache": False, "kv_cache.memory_fraction": 0.15}
    engines = {
        name: LLM(model, accelerator="cpu", config={**settings, "features.batch_invariant": on})
        for name, on in MODES.items()
    }
    try:
        longest = min(2000, engines["default"].engine.planned.spec.max_model_len - 8)
        rounds = options.rounds or (2 if options.quick else 7)
        new = 8 if options.quick else 32
        rows = [_decode(engines, batch, new, rounds) for batch in (1, 8, 32)]
        lengths = (128, 512) if options.quick else (128, 512, longest)
        return rows + [_prefill(engines, length, rounds) for length in sorted(set(lengths)) if length <= longest]
    finally:
        for llm in engines.values():
            llm.close()


def _decode(engines: dict[str, Any], batch: int, new: int, rounds: int) -> dict[str, Any]:
    prompts = _prompts(engines, batch, DECODE_PROMPT)

    def seconds(llm: Any) -> float:
        from common import step_seconds

        return step_seconds(_timed(llm, prompts, new), _timed(llm, prompts, 1), new)

    times = _alternating(engines, seconds, rounds, f"decode, batch {batch}")
    return _row(f"decode, batch {batch}", times, batch, None if batch < 8 else TARGET)


def _prefill(engines: dict[str, Any], length: int, rounds: int) -> dict[str, Any]:
    prompts = _prompts(engines, 1, length)
    times = _alternating(engines, lambda llm: _timed(llm, prompts, 1), rounds, f"prefill, {length} tokens")
    return _row(f"prefill, {length} tokens", times, length, TARGET)


def _prompts(engines: dict[str, Any], count: int, length: int) -> list[list[int]]:
    from common import random_prompts

    return random_prompts(count, length, vocab_size=engines["default"].engine.planned.spec.vocab_size)


def _timed(llm: Any, prompts: list[list[int]], new: int) -> float:
    from deepinfer_core import SamplingParams

    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), progress=False)
    return time.perf_counter() - start


def _alternating(engines: dict[str, Any], seconds: Any, rounds: int, what: str) -> dict[str, list[float]]:
    from common import say

    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        say(f"{what}, round {number} of {rounds}")
        for name, llm in engines.items():
            taken = seconds(llm)
            if number:
                times[name].append(taken)
    return times


def _row(what: str, times: dict[str, list[float]], tokens: int, target: float | None) -> dict[str, Any]:
    from common import settled

    medians = {name: statistics.median(settled(values, f"{what}, {name}")) for name, values in times.items()}
    pairs = settled([on / off for on, off in zip(times["invariant"], times["default"], strict=True)], what)
    return {
        "what": what,
        **{name: tokens / median for name, median in medians.items()},
        "ratio": (medians["invariant"] / medians["default"], min(pairs), max(pairs)),
        "target": target,
    }


if __name__ == "__main__":
    main()
