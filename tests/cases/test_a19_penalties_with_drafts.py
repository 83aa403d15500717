"""A19 with drafts: each row of a step is penalised by what it would have seen, never by a draft that was wrong.

CONST by hand, as in ``test_a19_penalties_ahead.py``: a history that misses the last token gives [3, 3, 5, 5, ...].
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from toys.checkpoints import EOS_ID, ToyLLM
from toys.checks import assert_clean, ids_of
from toys.drafters import TOLD, drafter_of, drafting

from deepinfer_core import LLM, SamplingParams

CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"frequency_penalty": 0.5, "max_tokens": 9}, [3, 5, 3, 5, 3, 5, 3, 5, 7]),
    ({"presence_penalty": 0.5, "max_tokens": 5}, [3, 5, 3, 3, 3]),
    ({"repetition_penalty": 4.0, "max_tokens": 5}, [3, 5, 3, 3, 3]),
]


@pytest.fixture
def llm(toy_llm: ToyLLM) -> LLM:
    return toy_llm("Const", **drafting("toy", vocab=16))


def told(llm: LLM, request: int, text: list[int], right: int) -> None:
    drafter = drafter_of(llm)
    drafter.settings = attrs.evolve(drafter.settings, right=right)
    TOLD[str(request), 0] = text


@pytest.mark.parametrize(("params", "expected"), CASES)
@pytest.mark.parametrize("right", range(9))
def test_penalties(llm: LLM, params: dict[str, Any], expected: list[int], right: int) -> None:
    told(llm, 0, [1, *expected], right)
    assert ids_of(llm.generate([1], SamplingParams(temperature=0, **params))) == [expected]
    first = drafter_of(llm).heard[0]
    assert first.accepted == min(right, first.proposed)


@pytest.mark.parametrize(("params", "expected"), CASES)
@pytest.mark.parametrize("draft", [[3] * 8, [5] * 8, [3, 3, 5, 5], [5, 5, 3, 3], [7, 3, 5, 3], [5, 3, 7]])
def test_fixed_drafts(llm: LLM, params: dict[str, Any], expected: list[int], draft: list[int]) -> None:
    """Drafts of the very tokens that the penalties are about, right and wrong: those of wrong ones do not stay."""
    drafter_of(llm).tokens = lambda row: draft  # type: ignore[method-assign]
    assert ids_of(llm.generate([1], SamplingParams(temperature=0, **params))) == [expected]


@pytest.mark.parametrize(("params", "expected"), CASES)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_beside_unpenalised_rows(llm: LLM, params: dict[str, Any], expected: list[int], row: int) -> None:
    batch = [SamplingParams(temperature=0, max_tokens=9)] * 3
    batch[row] = SamplingParams(temperature=0, **params)
    for request in range(3):
        told(llm, request, [1, *(expected if request == row else [3] * 9)], right=4)
    outputs = ids_of(llm.generate([[1]] * 3, batch))
    assert outputs[row] == expected
    assert [ids for i, ids in enumerate(outputs) if i != row] == [[3] * 9] * 2
    assert_clean(llm)


def test_drafts_are_no_output_after_preemption(toy_llm: ToyLLM) -> None:
    """Replayed outputs still count for penalties, the drafts that were lost with the blocks do not."""
    llm = toy_llm("Const", kv_cache__num_blocks=6, **drafting("excessive", vocab=16))
    params, expected = CASES[0]
    for request in range(4):
        told(llm, request, [1, 1, 1, *expected], right=2)
    outputs = llm.generate([[1, 1, 1]] * 4, SamplingParams(temperature=0, **params))
    assert ids_of(outputs) == [expected] * 4
    assert sum(output.metrics.preemptions for output in outputs) > 0


@pytest.fixture
def text_llm(toy_llm: ToyLLM) -> LLM:
    logits = {"97": 2.0, "98": 1.9, str(EOS_ID): 2.5}
    return toy_llm("Const", tokenizer=True, logits=logits, **drafting("toy", vocab=97))


@pytest.mark.parametrize("right", range(7))
def test_bad_words(text_llm: LLM, right: int) -> None:
    """The last token of a bad word is banned by drafts before it, as by tokens."""
    told(text_llm, 0, [1, *b"abababa"], right)
    params = SamplingParams(temperature=0, max_tokens=7, bad_words=["aa"], min_tokens=7)
    assert text_llm.generate([[1]], params)[0].outputs[0].text == "abababa"


@pytest.mark.parametrize("draft", [b"aaaa", b"bbbb", b"abaa", b"baba"])
def test_bad_words_in_the_drafts(text_llm: LLM, draft: bytes) -> None:
    drafter_of(text_llm).tokens = lambda row: list(draft)  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=7, bad_words=["aa"], min_tokens=7)
    assert text_llm.generate([[1]], params)[0].outputs[0].text == "abababa"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("draft", [[97] * 6, [EOS_ID] * 3, [97, EOS_ID, 97]])
def test_min_tokens(text_llm: LLM, min_tokens: int, draft: list[int]) -> None:
    drafter_of(text_llm).tokens = lambda row: draft  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens)
    (output,) = text_llm.generate([[1]], params)
    assert output.outputs[0].token_ids == [97] * min_tokens + [EOS_ID]
    assert output.outputs[0].finish_reason == "stop"
