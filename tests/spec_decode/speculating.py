"""Engines with and without a drafter side by side, and requests to compare them with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toys.checkpoints import open_toy
from toys.device_drafters import TEXTS
from toys.drafters import assert_same

from deepinfer_core import LLM, RequestOutput, SamplingParams


def random_prompts(rng: random.Random, count: int, longest: int = 14) -> list[list[int]]:
    return [[rng.randrange(64) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def random_params(rng: random.Random, longest: int = 24) -> SamplingParams:
    """Anything that may depend on what was produced before."""
    options: dict[str, Any] = {
        "max_tokens": rng.randrange(1, longest),
        "temperature": rng.choice([0, 0, 0.6, 1.0, 2.0]),
        "seed": rng.randrange(1000),
    }
    maybe: dict[str, Any] = {
        "presence_penalty": rng.choice([-0.5, 0.5, 2.0]),
        "frequency_penalty": rng.choice([-0.3, 0.7]),
        "repetition_penalty": rng.choice([0.8, 1.5]),
        "min_tokens": rng.randrange(options["max_tokens"] + 1),
        "stop_token_ids": rng.sample(range(64), 6),
        "logit_bias": {rng.randrange(64): 4.0, rng.randrange(64): -100.0},
        "allowed_token_ids": rng.sample(range(64), 20),
        "top_k": rng.randrange(1, 9),
        "top_p": rng.choice([0.3, 0.9]),
        "min_p": 0.05,
        "logprobs": rng.randrange(4),
        "logprobs_mode": rng.choice(["raw", "processed"]),
        "prompt_logprobs": rng.randrange(3),
        "n": rng.randrange(2, 4),
    }
    options.update((name, value) for name, value in maybe.items() if rng.random() < 0.25)
    return SamplingParams(**options)


def drafting(method: str, depth: int = 5, **more: Any) -> dict[str, Any]:
    """Settings of an engine over toys with a device drafter."""
    return {
        "speculation__method": method,
        "speculation__max_draft_tokens": depth,
        "plugins__paths": ["toys.plugin", "toys.device_drafters"],
        **more,
    }


def fix_seeds(llm: LLM, base: int = 0) -> None:
    """Requests without a seed get the same ones in every run of a test, others for another base; so does the noise that
    drafts under the rejection rule are drawn with. They count as requests without a seed as before."""
    inner, count = llm.engine.intake.request, itertools.count(base)

    def request(*args: Any, **kwargs: Any) -> Any:
        made = inner(*args, **kwargs)
        made.seed = (next(count) * 0x9E3779B97F4A7C15 + 1) % 2**64
        return made

    llm.engine.intake.request = request  # type: ignore[method-assign]
    if (runtime := llm.engine.core.runner.drafting) is not None:
        runtime._generator.manual_seed(11)


def tell(outputs: Sequence[RequestOutput]) -> None:
    """The told drafter shall know these results."""
    TEXTS.extend([*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs)


def check_same(plain: LLM, drafting: LLM, prompts: Sequence[list[int]], params: Any, tolerance: float = 1e-5) -> None:
    """The drafting engine gives what the plain one gives, and its drafter never failed."""
    expected = plain.generate(list(prompts), params)
    TEXTS.clear()
    tell(expected)
    assert_same(drafting.generate(list(prompts), params), expected, tolerance)
    speculator = drafting.engine.core.speculator
    assert speculator is not None
    assert speculator.failures == 0


def pair(directory: Path, settings: dict[str, Any], **options: Any) -> tuple[LLM, LLM]:
    return open_toy(directory, **options), open_toy(directory, **{**options, **settings})
