"""Many completions of one prompt, at temperature 1 and with one seed, in traffic that changes: one distinct output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint, demo, tiny_qwen3

from deepinfer_core import LLM, SamplingParams


def distinct_outputs(
    checkpoint: Checkpoint, prompt: Sequence[int], *, count: int, tokens: int, invariant: bool = True
) -> set[tuple[Any, ...]]:
    """Tokens and log-probabilities of ``count`` completions, the same request each time."""
    source = random.Random(11)
    mine = SamplingParams(temperature=1.0, seed=1234, max_tokens=tokens, logprobs=1, ignore_eos=True)
    found: set[tuple[Any, ...]] = set()
    done = 0
    settings = {**checkpoint.settings, "features.batch_invariant": invariant, "scheduling.max_batch_tokens": 200}
    with LLM(checkpoint.path, config=settings) as llm:
        while done < count:
            copies = min(source.choice((1, 2, 7, 30, 60)), count - done)
            batch = [(True, list(prompt), mine)] * copies
            for _ in range(source.choice((0, 1, 5, 20))):
                other = [source.randrange(3, checkpoint.vocab) for _ in range(source.randrange(1, 90))]
                params = SamplingParams(
                    temperature=source.choice((0.0, 0.8)), max_tokens=source.randrange(1, tokens), ignore_eos=True
                )
                batch.append((False, other, params))
            source.shuffle(batch)
            outputs = llm.generate([p for _, p, _ in batch], [s for _, _, s in batch], progress=False)
            for (is_mine, _, _), output in zip(batch, outputs, strict=True):
                if is_mine:
                    completion = output.outputs[0]
                    pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
                    values = tuple(entries[token].logprob for token, entries in pairs)
                    found.add((tuple(completion.token_ids), values))
                    done += 1
    return found


def test_one_output_in_changing_traffic(tmp_path: Path) -> None:
    checkpoint = tiny_qwen3(tmp_path)
    assert len(distinct_outputs(checkpoint, checkpoint.prompt(30), count=150, tokens=40)) == 1


def test_without_the_feature_bits_move(tmp_path: Path) -> None:
    """The suite can fail: the host's own operators take prompts and decode rows two ways."""
    checkpoint = tiny_qwen3(tmp_path)
    found = distinct_outputs(checkpoint, checkpoint.prompt(30), count=150, tokens=40, invariant=False)
    assert len(found) > 1


@pytest.mark.slow
def test_a_thousand_completions_of_the_demo_model() -> None:
    assert len(distinct_outputs(demo(), range(500, 537), count=1000, tokens=64)) == 1
