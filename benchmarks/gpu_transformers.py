"""transformers beside the engine on a GPU: the same random model in the shape of Qwen3-4B, prompts and tokens.

Three of its ways: ``generate`` with its defaults, with a static cache, for which it compiles the step, and continuous
batching (``generate_batch``). A step is the difference of two lengths of text, for both sides; continuous batching is
measured from prompts to the last token. Results are written to ``--out`` as they come; what is there is not measured
again. ``python benchmarks/gpu_transformers.py --out results``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import finish, print_table, random_prompts
from gpu_common import Results, plugin_paths, require_gpu
from gpu_model import QUICK, QWEN3_4B, checkpoint

PROMPT, SHORT, LONG = 512, 2, 34
"""Tokens of a prompt, and of the two texts that a step is the difference of."""
REQUESTS, TOKENS = 64, 64
"""Of the text that is measured whole."""
WAYS = ("deepinfer", "generate", "static", "continuous")
BATCHES = (1, 8, 64)
Prompts = list[list[int]]


def step_ms(texts: Callable[[int], float], rounds: int = 3) -> dict[str, float]:
    """Milliseconds a decode step by texts of two lengths; ``texts``: tokens -> seconds. The first ones warm up."""
    texts(SHORT), texts(LONG)
    found = [(texts(LONG) - texts(SHORT)) / (LONG - SHORT) * 1000 for _ in range(rounds)]
    return {"ms": statistics.median(found), "least": min(found), "most": max(found)}


def whole_rate(texts: Callable[[int], float], tokens: int, requests: int, rounds: int = 3) -> dict[str, float]:
    """Tokens of output a second, prompts included."""
    texts(tokens)
    found = [requests * tokens / texts(tokens) for _ in range(rounds)]
    return {"tokens_per_second": statistics.median(found), "least": min(found), "most": max(found)}


class Ours:
    """The engine with its defaults, but for a cache of prefixes: prompts come again."""

    def __init__(self, path: Path, accelerator: str, **settings: Any) -> None:
        from deepinfer_core import LLM

        config = {"kv_cache.prefix_cache": False, "logging.progress": False, "plugins.paths": list(plugin_paths())}
        self._llm = LLM(path, accelerator=accelerator, config=config | settings)

    def texts(self, prompts: Prompts, tokens: int) -> float:
        from deepinfer_core import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.monotonic()
        outputs = self._llm.generate(prompts, params)
        spent = time.monotonic() - began
        assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * len(prompts)
        return spent

    def close(self) -> None:
        self._llm.close()


class Theirs:
    """transformers' model on ``device``."""

    def __init__(self, path: Path, device: str) -> None:
        import transformers

        self.version = transformers.__version__
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.model = model.to(device)
        self._device = torch.device(device)

    def _wait(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def texts(self, prompts: Prompts, tokens: int, **ways: Any) -> float:
        ids = torch.tensor(prompts, device=self._device)
        began = self._wait()
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **ways,
            )
        spent = self._wait() - began
        assert found.shape == (len(prompts), len(prompts[0]) + tokens)
        return spent

    def continuous(self, prompts: Prompts, tokens: int) -> float:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = self._wait()
        found = self.model.generate_batch(inputs=prompts, generation_config=config)
        spent = self._wait() - began
        lengths = [len(output.generated_tokens) for output in found.values()]
        assert lengths == [tokens] * len(prompts), lengths
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("/dev/shm/qwen3-4b-random"), help="where the model goes"
    )
    parser.add_argument("--only", nargs="*", choices=WAYS, default=WAYS, help="ways to measure")
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES, help="requests of which a step is measured")
    parser.add_argument("--quick", action="store_true", help="four layers")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_transformers")
    config = QUICK if options.quick else QWEN3_4B
    results = Results(options.out / "gpu_transformers.json", options.quick)
    path = checkpoint(options.checkpoint, config)

    def prompts(count: int) -> Prompts:
        return [random_prompts(1, PROMPT, seed=n, vocab_size=config["vocab_size"])[0] for n in range(count)]

    def take(key: str, fn: Callable[[], dict[str, float]]) -> None:
        print(key, results.measure(key, fn), flush=True)

    if "deepinfer" in options.only:
        with closing(Ours(path, "nvidia_sm100")) as ours:
            for batch in options.batches:
                take(f"deepinfer {batch}", partial(step_ms, partial(ours.texts, prompts(batch))))
            take("deepinfer whole", partial(whole_rate, partial(ours.texts, prompts(REQUESTS)), TOKENS, REQUESTS))
    if set(options.only) - {"deepinfer"}:
        theirs = Theirs(path, "cuda")
        results.measure("transformers", lambda: {"version": theirs.version})
        if "continuous" in options.only:
            texts = partial(theirs.continuous, prompts(REQUESTS))
            take("continuous whole", partial(whole_rate, texts, TOKENS, REQUESTS))
        for way, ways in (("generate", {}), ("static", {"cache_implementation": "static"})):
            if way in options.only:
                for batch in options.batches:
                    take(f"{way} {batch}", partial(step_ms, partial(theirs.texts, prompts(batch), **ways)))
    print_table(
        ["", "ms a step", "tokens/s"],
        [[key, e.get("ms"), e.get("tokens_per_second")] for key, e in results.entries.items() if key != "transformers"],
    )
    finish(results.entries, options.json)


if __name__ == "__main__":
    main()
