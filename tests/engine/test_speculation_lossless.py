"""With a drafter, whatever it proposes, every request gets what it gets without one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from toys.checkpoints import EOS_ID, ToyLLM, open_toy, write_toy
from toys.checks import assert_clean, ids_of
from toys.drafters import TOLD, Twins, drafter_of, drafting
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import SamplingParams

GROUPS: dict[str, dict[str, int | None]] = {
    "full": {"full": None},
    "near": {"near": 6},
    "both": {"full": None, "near": 3},
}
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "right": ("toy", {}),
    "wrong": ("toy", {"right": 0}),
    "right for 1": ("toy", {"right": 1}),
    "right for 3": ("toy", {"right": 3, "depth": 7}),
    "ends early": ("early", {"right": 2, "token": 5}),
    "outside": ("outside", {"right": 2}),
    "silent": ("silent", {}),
    "excessive": ("excessive", {}),
    "excessive, half right": ("excessive", {"right": 4}),
    "varying": ("varying", {}),
    "raising": ("raising", {"every": 3}),
    "garbage": ("garbage", {}),
    "only some": ("toy", {"only": "1"}),
}


DEPTHS = [(depth, right) for depth in (1, 2, 3, 5, 8) for right in range(depth + 1)]


def random_prompts(rng: random.Random, count: int, longest: int = 14) -> list[list[int]]:
    return [[rng.randrange(64) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def random_params(rng: random.Random) -> SamplingParams:
    """Anything that may depend on what was produced before."""
    options: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 24),
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


def twins(directory: Path, method: str, drafter: dict[str, Any], **options: Any) -> Twins:
    return Twins(open_toy(directory, **options), open_toy(directory, **options, **drafting(method, **drafter)))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_request_with_any_drafter(tmp_path: Path, groups: str, drafter: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    method, settings = DRAFTERS[drafter]
    directory = write_toy(tmp_path / "toy", "PrefixHash", groups=GROUPS[groups])
    both = twins(directory, method, settings, scheduling__max_batch_tokens=rng.choice([13, 64]))
    for _ in range(2):
        prompts = random_prompts(rng, 9)
        both.generate(prompts, [random_params(rng) for _ in prompts])
        assert_clean(both.drafting)
    both.plain.close()
    both.drafting.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_right_for_exactly_so_many_tokens(toy_llm: ToyLLM, temperature: float) -> None:
    """Each step yields the right drafts and one token more; the last one what is left."""
    oracle, params = HashOracle(64, [None]), SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    prompts = [[i] * (i + 1) for i in (4, 7)]
    texts = [oracle.tokens(prompt, 20, temperature=temperature, seed=3) for prompt in prompts]
    llm = toy_llm("PrefixHash", **drafting("toy"))
    drafter, first_id = drafter_of(llm), 0
    for depth, right in DEPTHS:
        drafter.settings, drafter.heard = attrs.evolve(drafter.settings, depth=depth, right=right), []
        TOLD.update({(str(first_id + i), 0): prompts[i] + texts[i] for i in range(2)})
        first_id += 2
        assert ids_of(llm.generate(prompts, params)) == texts
        whole = [v for v in drafter.heard if v.proposed == depth]
        assert {v.accepted for v in whole} == {right}
        assert {len(v.tokens) for v in whole} == {right + 1}
        # The first token comes with the prompt; drafts are whole while more than their number is missing.
        assert len(whole) == 2 * (1 + (19 - depth - 1) // (right + 1))
    assert drafter.wrong == []
    assert_clean(llm)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """COUNT over bytes, with a drafter that is always right: text in alphabetical order."""
    directory = write_toy(tmp_path_factory.mktemp("toy") / "count", "Count", tokenizer=True, count_mod=256)
    settings = {"knows": "count", "vocab": 256, "depth": 12, "max_draft_tokens": 12}
    both = twins(directory, "toy", settings)
    yield both
    both.plain.close()
    both.drafting.close()


TEXT_CASES: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["efg"]},
    "stop string kept": {"stop": ["efg"], "include_stop_str_in_output": True},
    "the longer of two": {"stop": ["ef", "efgh"]},
    "a longer one that does not come": {"stop": ["ef", "efx"]},
    "at the first token": {"stop": ["b"]},
    "below min_tokens": {"stop": ["efg"], "min_tokens": 9},
    "at min_tokens": {"stop": ["efg"], "min_tokens": 6},
    "held back at the end": {"stop": ["uvwxyz"]},
    "stop id": {"stop_token_ids": [ord("h")]},
    "stop id and string at once": {"stop_token_ids": [ord("g")], "stop": ["efg"]},
    "bad word": {"bad_words": ["fg"]},
    "bad words": {"bad_words": ["g", "kl"], "frequency_penalty": 2.0},
    "never": {"stop": ["gfe"]},
}


@pytest.mark.parametrize("case", TEXT_CASES)
@pytest.mark.parametrize("max_tokens", [1, 5, 6, 7, 22])
def test_text(texts: Twins, case: str, max_tokens: int) -> None:
    options = {"logprobs": 1, **TEXT_CASES[case]}
    if options.get("min_tokens", 0) <= max_tokens:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
        texts.generate([[ord("a")], [ord("D"), ord("a")], [ord("h")]], params)
        assert_clean(texts.drafting)


@pytest.mark.parametrize("case", TEXT_CASES)
def test_streamed_text(texts: Twins, case: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=22, **TEXT_CASES[case])
    (output,) = texts.plain.generate([[ord("a")]], params)
    deltas = list(texts.drafting.stream([ord("a")], params))
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text
    assert [i for delta in deltas for i in delta.token_ids] == output.outputs[0].token_ids
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [output.outputs[0].finish_reason]
    assert_clean(texts.drafting)


def test_a_stream_gets_its_tokens_in_order_while_others_run(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", **drafting("varying", knows="hash"))
    oracle = HashOracle(64, [None])
    streams = {i: llm.stream([i] * (i + 1), SamplingParams(temperature=0, max_tokens=30)) for i in range(4)}
    got: dict[int, list[int]] = {i: [] for i in streams}
    while streams:
        for i, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[i]
            else:
                got[i] += delta.token_ids
    assert got == {i: oracle.tokens([i] * (i + 1), 30) for i in range(4)}
    assert_clean(llm)


@pytest.mark.parametrize("right", [0, 1, 4, 9])
def test_end_of_sequence_within_the_drafts(toy_llm: ToyLLM, right: int) -> None:
    """COUNT's end token is among the drafts, wherever they begin; a wrong end token ends nothing."""
    llm = toy_llm("Count", eos_token_id=20, **drafting("early", knows="count", right=right, token=20, depth=9))
    params = SamplingParams(temperature=0, max_tokens=40)
    outputs = llm.generate([[start] for start in range(3, 19)], params)
    assert ids_of(outputs) == [list(range(start + 1, 21)) for start in range(3, 19)]
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}
    assert_clean(llm)


@pytest.mark.parametrize("ignore", [False, True])
def test_ignored_end_of_sequence(toy_llm: ToyLLM, ignore: bool) -> None:
    llm = toy_llm("Count", eos_token_id=20, **drafting("toy", knows="count"))
    (output,) = llm.generate([[10]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=ignore))
    assert output.outputs[0].token_ids == list(range(11, 31 if ignore else 21))


@pytest.mark.parametrize("length", [1, *range(20, 32)])
def test_the_longest_length_ends_a_request(toy_llm: ToyLLM, length: int) -> None:
    """``max_model_len`` and ``max_tokens``, whichever comes first; never one token more."""
    llm = toy_llm("Count", max_len=32, **drafting("excessive", knows="count"))
    (output,) = llm.generate([list(range(length))], SamplingParams(temperature=0, max_tokens=9))
    expected = count_tokens([length - 1], min(9, 32 - length), 64)
    assert output.outputs[0].token_ids == expected
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.output_tokens == len(expected)
    assert_clean(llm)


def test_a_drafter_makes_the_loop_synchronous(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", scheduling__async_scheduling=True, **drafting("varying", knows="hash"))
    assert llm.engine.planned.plan.facts["loop"] == "synchronous: the drafter needs the last tokens on the host"
    assert llm.engine.core.ahead == 0
    prompts = [[i] * (i + 1) for i in range(6)]
    expected = [HashOracle(64, [None]).tokens(prompt, 15) for prompt in prompts]
    assert ids_of(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=15))) == expected


def test_min_tokens_masks_the_end_in_every_row(toy_llm: ToyLLM) -> None:
    logits = {"97": 2.0, str(EOS_ID): 2.5}
    llm = toy_llm("Const", tokenizer=True, logits=logits, **drafting("early", token=EOS_ID, right=0))
    for least in range(7):
        TOLD[str(least), 0] = [1, *[97] * 9]
        (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=9, min_tokens=least))
        assert output.outputs[0].token_ids == [97] * least + [EOS_ID]
