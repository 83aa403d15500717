"""The engine against the training forward: on the trained weights, and on small models drawn afresh."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.shape import Shape
from toys.seeds import module_seed
from v4.support import TOLERANCE, Oracle, Stepper, assert_same, chunk_ends, plan_of

from deepinfer_core import LLM, SamplingParams

from .support import LENGTH, SMALL, answer, random_weights, text_tokens, trained, write

SEED = module_seed(__name__)
BLOCK = {"kv_cache.block_size": 32, "model.dtype": "float32"}
HCA_RATE = 32


@cache
def wanted(number: int) -> Oracle:
    return answer(*trained(), text_tokens(number))


def stepper(**settings: Any) -> Stepper:
    return Stepper(CHECKPOINT, length=LENGTH + 8, requests=2, **{**BLOCK, **settings})


@pytest.mark.parametrize("more", [0, 1])
def test_the_training_forward_is_the_engine(tmp_path: Path, more: int) -> None:
    """Random weights: every part of the architecture shows in the result."""
    seed, shape = SEED + more, Shape.read(SMALL)
    path = write(random_weights(shape, seed), SMALL, tmp_path)
    tokens = torch.randint(0, shape.vocab, (75,), generator=torch.Generator().manual_seed(seed)).tolist()
    oracle = answer(checkpoint.load(path), shape, tokens)
    settings = {**BLOCK, "kv_cache.block_size": 8}
    assert_same(Stepper(path, **settings).step([(0, tokens, 0)]), oracle, f"seed {seed}")
    assert_same(Stepper(path, **settings).run(tokens, chunk_ends(75, 7)), oracle, f"seed {seed}, in chunks")


def test_one_shot() -> None:
    assert_same(stepper().step([(0, wanted(0).tokens, 0)]), wanted(0), "one shot")


def test_near_ties_do_not_excuse_the_text() -> None:
    """The oracle leaves out what follows a near tie of index scores: that must not be the text."""
    for number in (0, 1):
        assert min(wanted(number).near_ties, default=LENGTH) > 280, sorted(wanted(number).near_ties)


def test_with_reference_operators_alone() -> None:
    ops = {request.op: ["reference"] for request in plan_of(CHECKPOINT, **BLOCK).spec.ops.values()}
    found = stepper(ops=ops).run(wanted(0).tokens, chunk_ends(LENGTH, 90))
    assert_same(found, wanted(0), "reference operators")


@pytest.mark.parametrize("size", [1, 3, 7, 31, 32, 33, 64, 100, 257])
def test_chunks(size: int) -> None:
    """Size 1 is token by token; most sizes cut the windows of 4 and of 32 tokens."""
    assert_same(stepper().run(wanted(0).tokens, chunk_ends(LENGTH, size)), wanted(0), f"chunks of {size}")


def test_batched_with_a_stranger_at_another_length() -> None:
    ours, other = wanted(0).tokens, wanted(1).tokens
    both = stepper()
    both.step([(1, other[:19], 0)])
    rows = both.step([(0, ours[:290], 0), (1, other[19:22], 19)])
    assert_same(rows[:290], wanted(0), "with a stranger", range(290))
    assert_same(rows[290:], wanted(1), "the stranger", range(19, 22))
    rows = both.step([(1, other[22:], 22), (0, ours[290:], 290)])
    assert_same(rows[: LENGTH - 22], wanted(1), "the stranger's rest", range(22, LENGTH))
    assert_same(rows[LENGTH - 22 :], wanted(0), "second chunk", range(290, LENGTH))


@pytest.mark.parametrize("length", [*range(285, 290), 319, 320])
def test_prompt_then_decode(length: int) -> None:
    """At every residue of 4, and where a window of 32 closes with the prompt."""
    one = stepper()
    tokens = wanted(0).tokens
    assert_same(one.run(tokens[:length], [length]), wanted(0), f"prompt of {length}", range(length))
    for position in range(length, length + 6):
        row = one.run(tokens[: position + 1], [position + 1], start=position)
        assert_same(row, wanted(0), f"decode at {position} after {length}", [position])


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_rejected_rows_leave_nothing_behind(depth: int) -> None:
    tokens, one = wanted(0).tokens, stepper()
    one.run(tokens[:250], [250])
    position = 250
    while position + depth < LENGTH:
        kept = (position * 7) % (depth + 1)
        wrong = [(token + 1) % 4096 for token in tokens[position + 1 + kept : position + 1 + depth]]
        rows = one.step([(0, [*tokens[position : position + 1 + kept], *wrong], position)])
        good = range(position, position + 1 + kept)
        assert_same(rows[: 1 + kept], wanted(0), f"depth {depth} at {position}", good)
        position += 1 + kept
        one.slide(0, position)


def test_prefix_hits_and_neighbours_change_nothing() -> None:
    """Greedy tokens through the whole engine are the training forward's, with cached prefixes and beside others."""
    weights, shape = trained()
    first = list(text_tokens(0)[:200])
    prompts = [first, first[:160] + list(text_tokens(1)[1:40]), first[:96], list(text_tokens(1)[:70])]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("demo-v4", dtype="float32", logging={"progress": False}) as llm:
        cold = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy)
        warm = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy)
    assert [o.metrics.cached_tokens for o in warm] == [192, 192, 95, 64]
    for prompt, one, two in zip(prompts, cold, warm, strict=True):
        found = list(one.outputs[0].token_ids)
        assert list(two.outputs[0].token_ids) == found
        said = answer(weights, shape, prompt + found).logprobs[len(prompt) - 1 : -1]
        taken = said.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert float((said.amax(1) - taken).max()) < TOLERANCE


@pytest.mark.parametrize("size", [LENGTH, 50, 7])
def test_bfloat16(size: int) -> None:
    """Against the training forward in float32 and in bfloat16: as near to the one as the other is."""
    found = stepper(**{"model.dtype": "bfloat16"}).run(wanted(0).tokens, chunk_ends(LENGTH, size))
    exact = wanted(0).logprobs
    other = answer(*trained(), text_tokens(0), torch.bfloat16).logprobs

    def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.exp() * (p - q)).sum(-1)

    ours, theirs = divergence(exact, found), divergence(exact, other)
    assert float(ours.median()) < 2 * float(theirs.median()) + 1e-4
    assert float(ours.mean()) < 0.02
    assert float((found.argmax(-1) == exact.argmax(-1)).double().mean()) > 0.95
