"""A03 (sgl-project/sglang#31599): a stop inside a multi-token step; the first event in token order ends the request.

COUNT with a drafter that is always right: the prompt and four steps give the first tokens, then one step has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toys.checkpoints import EOS_ID, ToyLLM, open_toy, write_toy
from toys.checks import assert_clean
from toys.drafters import Twins, drafter_of, drafting

from deepinfer_core import LLM, SamplingParams

A = ord("a")
DRAFTS = drafting("toy", knows="count", vocab=256, max_draft_tokens=12)


@pytest.fixture
def llm(toy_llm: ToyLLM) -> LLM:
    """Answers "b", "c", "d", ... to "a"; drafts 4 tokens once 4 are out."""
    return late_drafts(toy_llm("Count", tokenizer=True, count_mod=256, **DRAFTS, plugins__drafter_plugin__depth=4))


def late_drafts(llm: LLM, after: int = 4) -> LLM:
    """No drafts until ``after`` tokens are out."""
    drafter = drafter_of(llm)
    inner = drafter.tokens
    drafter.tokens = (  # type: ignore[method-assign]
        lambda row: inner(row) if len(row.tokens) - row.prompt_len >= after else []
    )
    return llm


def run(llm: LLM, **params: Any) -> Any:
    (output,) = llm.generate([[A]], SamplingParams(temperature=0, **params))
    (completion,) = output.outputs
    assert output.metrics.output_tokens == len(completion.token_ids)
    assert_clean(llm)
    return completion


def last_step(llm: LLM) -> tuple[int, int]:
    """Drafts of the last verified step, and how many were right."""
    verdict = drafter_of(llm).heard[-1]
    return verdict.proposed, verdict.accepted


# The step yields f, g, h, i, j after b, c, d, e.


def test_a_stop_before_the_length(llm: LLM) -> None:
    """(a) t S u v w at max_tokens 7: nothing after S."""
    completion = run(llm, max_tokens=7, stop_token_ids=[ord("g")])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("bcdefg", "stop", ord("g"))
    assert last_step(llm) == (2, 2)


def test_a_stop_before_the_length_with_room_for_all(llm: LLM) -> None:
    completion = run(llm, max_tokens=20, stop_token_ids=[ord("g")])
    assert (completion.text, completion.finish_reason) == ("bcdefg", "stop")
    assert last_step(llm) == (4, 4)


def test_b_length_before_the_stop(llm: LLM) -> None:
    """(b) S would be the sixth token of five."""
    completion = run(llm, max_tokens=5, stop_token_ids=[ord("g")])
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("bcdef", "length", None)


def test_c_length_in_the_middle_of_the_step(llm: LLM) -> None:
    """(c) t u v S at max_tokens 6."""
    completion = run(llm, max_tokens=6, stop_token_ids=[ord("i")])
    assert (completion.text, completion.finish_reason) == ("bcdefg", "length")


def test_stop_wins_at_the_same_token(llm: LLM) -> None:
    completion = run(llm, max_tokens=6, stop_token_ids=[ord("g")])
    assert (completion.text, completion.finish_reason) == ("bcdefg", "stop")


@pytest.mark.parametrize("out", [1, 4])
@pytest.mark.parametrize("include", [False, True])
def test_d_a_stop_string_with_eleven_tokens_after_it(toy_llm: ToyLLM, out: int, include: bool) -> None:
    """(d) The first of the step's twelve tokens completes it; ``out`` tokens were there before."""
    llm = toy_llm("Count", tokenizer=True, count_mod=256, **DRAFTS, plugins__drafter_plugin__depth=11)
    late_drafts(llm, out)
    ids = list(range(A + 1, A + out + 2))
    text = bytes(ids).decode()
    completion = run(llm, max_tokens=40, stop=[text[-2:]], include_stop_str_in_output=include, logprobs=0)
    assert last_step(llm) == (11, 11)
    assert list(drafter_of(llm).heard[-1].tokens) == ids[-1:]
    assert completion.token_ids == ids
    assert len(completion.logprobs) == len(ids)
    assert completion.text == (text if include else text[:-2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", text[-2:])


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """COUNT up to its end token 256; every draft is right."""
    directory = write_toy(tmp_path_factory.mktemp("toy") / "count", "Count", tokenizer=True, count_mod=257)
    settings = drafting("toy", knows="count", vocab=257, max_draft_tokens=11, depth=11)
    with open_toy(directory) as plain, open_toy(directory, **settings) as drafted:
        yield Twins(plain, drafted)


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("kind", ["id", "string", "eos"])
def test_a_stop_anywhere_in_a_step_of_twelve(twins: Twins, place: int, kind: str) -> None:
    """As without drafts, for every kind of stop and every length limit around it."""
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "id": (200, {"stop_token_ids": [202 + place]}),
        "string": (A, {"stop": [chr(A + 2 + place)]}),
        "eos": (EOS_ID - 2 - place, {}),
    }
    start, ends = kinds[kind]
    for max_tokens in (place + 1, place + 2, place + 3, 30):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **ends)
        (output,) = twins.generate([[start]], params)
        assert output.outputs[0].finish_reason == ("length" if max_tokens < place + 2 else "stop")
        assert output.metrics.output_tokens == min(max_tokens, place + 2)
        assert_clean(twins.drafting)
