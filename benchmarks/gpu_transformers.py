"""transformers beside the engine on a GPU: the same random model in the shape of Qwen3-4B, prompts and tokens.

Three of its ways: ``generate`` with its defaults, with a static cache, for which it compiles the step, and continuous
batching (``generate_batch``). A step is the difference of two lengths of text, for both sides; continuous batching is
measured from prompts to the last token. Results are written to ``--out`` as they come; what is there is not measured
again. ``python benchmarks/gpu_transformers.py --out results``
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
from collections.abc import Callable
from contextlib import closing
from functools import partial

import peers
import torch
from common import finish, print_table, random_prompts
from gpu_common import Results, plugin_paths, require_gpu
from gpu_model import QUICK, QWEN3_4B, add_places, checkpoint
from peers import Peer, Prompts

PROMPT, SHORT, LONG = 512, 2, 34
"""Tokens of a prompt, and of the two texts that a step is the difference of."""
REQUESTS, TOKENS = 64, 64
"""Of the text that is measured whole."""
WAYS = ("deepinfer", "generate", "static", "continuous")
BATCHES = (1, 8, 64)


def step_ms(peer: Peer, prompts: Prompts, rounds: int = 3) -> dict[str, float]:
    """Milliseconds a decode step by texts of two lengths; the first ones warm up."""
    # The long one first: a static cache is kept as long as it has to be, so that the step is compiled once.
    seconds(peer, prompts, LONG), seconds(peer, prompts, SHORT)
    times = [seconds(peer, prompts, LONG) - seconds(peer, prompts, SHORT) for _ in range(rounds)]
    found = [spent / (LONG - SHORT) * 1000 for spent in times]
    return {"ms": statistics.median(found), "least": min(found), "most": max(found)}


def whole_rate(peer: Peer, prompts: Prompts, rounds: int = 3) -> dict[str, float]:
    """Tokens of output a second, prompts included."""
    seconds(peer, prompts, TOKENS)
    found = [len(prompts) * TOKENS / seconds(peer, prompts, TOKENS) for _ in range(rounds)]
    return {"tokens_per_second": statistics.median(found), "least": min(found), "most": max(found)}


def seconds(peer: Peer, prompts: Prompts, tokens: int) -> float:
    spent, ids = peer.run(prompts, tokens)
    assert [len(text) for text in ids] == [tokens] * len(prompts)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_places(parser)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS, help="ways to measure")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, help="requests of which a step is measured")
    parser.add_argument("--quick", action="store_true", help="four layers")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_transformers")
    config = QUICK if options.quick else QWEN3_4B
    results = Results(options.out / "gpu_transformers.json", options.quick)
    path = checkpoint(options.checkpoint, config)

    def prompts(count: int) -> list[list[int]]:
        return [random_prompts(1, PROMPT, seed=n, vocab_size=config["vocab_size"])[0] for n in range(count)]

    def take(key: str, fn: Callable[[], dict[str, float]]) -> None:
        print(key, results.measure(key, fn), flush=True)

    if "deepinfer" in options.only:
        settings = {"plugins.paths": list(plugin_paths())}
        with closing(peers.deepinfer(path, accelerator="nvidia_sm100", **settings)) as ours:
            for batch in options.batches:
                take(f"deepinfer {batch}", partial(step_ms, ours, prompts(batch)))
            take("deepinfer whole", partial(whole_rate, ours, prompts(REQUESTS)))
    if set(options.only) - {"deepinfer"}:
        results.measure("transformers", lambda: {"version": importlib.metadata.version("transformers")})
        model = peers.transformers_model(path, torch.bfloat16, "cuda")
        if "continuous" in options.only:
            take("continuous whole", partial(whole_rate, peers.transformers_continuous(model), prompts(REQUESTS)))
        for way, ways in (("generate", {}), ("static", {"cache_implementation": "static"})):
            if way in options.only:
                theirs = peers.transformers_generate(model, **ways)
                for batch in options.batches:
                    take(f"{way} {batch}", partial(step_ms, theirs, prompts(batch)))
    print_table(
        ["", "ms a step", "tokens/s"],
        [[key, e.get("ms"), e.get("tokens_per_second")] for key, e in results.entries.items() if key != "transformers"],
    )
    finish(results.entries, options.json)


if __name__ == "__main__":
    main()
