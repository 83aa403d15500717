"""How requests end: EOS, stop ids, stop strings, min_tokens, and which of two ends wins."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import EOS, EOS_ID
from toys.checks import assert_clean

from deepinfer_core import CompletionOutput, SamplingParams

AB, FOO, ND_BAR, THE = 257, 258, 259, 260
E_, N_, D_, X_ = b"ENDx"


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Scripted:
    """SCRIPT engines: the output is ``script`` whatever the prompt of one token is."""

    def __init__(self, toy_llm: Any, ahead: bool) -> None:
        self.make = toy_llm
        self.ahead = ahead

    def __call__(self, script: list[int], **params: Any) -> CompletionOutput:
        llm = self.make("Script", tokenizer=True, script=[*script, 0], scheduling__async_scheduling=self.ahead)
        whole = SamplingParams(**{"temperature": 0, "max_tokens": len(script), "logprobs": 0} | params)
        (output,) = llm.generate([[0]], whole)
        assert_clean(llm)
        (completion,) = output.outputs
        assert [list(entry) for entry in completion.logprobs] == [[token] for token in completion.token_ids]
        parts = list(llm.stream([0], whole))
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [part.finish_reason for part in parts if part.finish_reason] == [completion.finish_reason]
        assert_clean(llm)
        result: CompletionOutput = completion
        return result


@pytest.fixture
def scripted(toy_llm: Any, ahead: bool) -> Scripted:
    return Scripted(toy_llm, ahead)


def end(completion: CompletionOutput) -> tuple[str | None, str | int | None, list[int], str]:
    return completion.finish_reason, completion.stop_reason, completion.token_ids, completion.text


# ---- ids


def test_eos_ends(scripted: Scripted) -> None:
    assert end(scripted([X_, EOS_ID, X_, X_])) == ("stop", None, [X_, EOS_ID], "x")


def test_eos_is_text_when_special_tokens_are_kept(scripted: Scripted) -> None:
    assert end(scripted([X_, EOS_ID, X_], skip_special_tokens=False))[3] == "x" + EOS


def test_ignore_eos_goes_on(scripted: Scripted) -> None:
    assert end(scripted([X_, EOS_ID, X_], ignore_eos=True)) == ("length", None, [X_, EOS_ID, X_], "xx")


def test_eos_as_a_stop_id_ends_although_eos_is_ignored(scripted: Scripted) -> None:
    completion = scripted([X_, EOS_ID, X_], ignore_eos=True, stop_token_ids=[EOS_ID])
    assert end(completion) == ("stop", EOS_ID, [X_, EOS_ID], "x")


def test_stop_id_ends_and_is_the_reason(scripted: Scripted) -> None:
    completion = scripted([X_, E_, N_, X_], stop_token_ids=[N_, D_])
    assert end(completion) == ("stop", N_, [X_, E_, N_], "xEN")


def test_many_stop_ids(scripted: Scripted) -> None:
    completion = scripted([X_, E_, N_, X_], stop_token_ids=[*range(200, 250), N_])
    assert end(completion)[:2] == ("stop", N_)


# ---- strings


def test_stop_string_across_tokens_is_cut(scripted: Scripted) -> None:
    completion = scripted([FOO, E_, ND_BAR, X_], stop="END")
    assert end(completion) == ("stop", "END", [FOO, E_, ND_BAR], "foo ")


def test_stop_string_is_kept_on_request(scripted: Scripted) -> None:
    completion = scripted([FOO, E_, ND_BAR, X_], stop="END", include_stop_str_in_output=True)
    assert end(completion) == ("stop", "END", [FOO, E_, ND_BAR], "foo END")


def test_near_miss_comes_out_whole(scripted: Scripted) -> None:
    assert end(scripted([E_, N_, X_], stop="END")) == ("length", None, [E_, N_, X_], "ENx")


def test_held_back_text_is_flushed_at_the_end(scripted: Scripted) -> None:
    assert end(scripted([X_, E_, N_], stop="END")) == ("length", None, [X_, E_, N_], "xEN")


def test_held_back_text_is_flushed_before_eos(scripted: Scripted) -> None:
    assert end(scripted([X_, E_, N_, EOS_ID], stop="END")) == ("stop", None, [X_, E_, N_, EOS_ID], "xEN")


def test_earliest_start_wins(scripted: Scripted) -> None:
    assert end(scripted([X_, *b"abcd"], stop=["bc", "abc"])) == ("stop", "abc", [X_, *b"abc"], "x")


def test_longest_of_equal_starts_wins(scripted: Scripted) -> None:
    assert end(scripted([X_, *b"abcd"], stop=["ab", "abc"])) == ("stop", "abc", [X_, *b"abc"], "x")


def test_shorter_of_equal_starts_ends_with_its_own_token(scripted: Scripted) -> None:
    assert end(scripted([X_, *b"ab", X_, X_], stop=["ab", "abc"])) == ("stop", "ab", [X_, *b"ab"], "x")


def test_shorter_of_equal_starts_at_the_length_limit(scripted: Scripted) -> None:
    assert end(scripted([X_, *b"ab"], stop=["ab", "abc"])) == ("stop", "ab", [X_, *b"ab"], "x")


def test_open_match_before_eos_is_the_first_event(scripted: Scripted) -> None:
    completion = scripted([X_, *b"ab", EOS_ID], stop=["ab", "abc"])
    assert end(completion) == ("stop", "ab", [X_, *b"ab"], "x")


def test_open_match_long_before_it_is_settled(scripted: Scripted) -> None:
    completion = scripted([X_, *b"ab", *b"cde", X_], stop=["ab", "abcdef"])
    assert end(completion) == ("stop", "ab", [X_, *b"ab"], "x")


def test_stop_string_equal_to_a_special_token(scripted: Scripted) -> None:
    completion = scripted([X_, EOS_ID, X_], stop=EOS, ignore_eos=True)
    assert end(completion) == ("stop", EOS, [X_, EOS_ID], "x")


def test_stop_string_written_in_ordinary_tokens(scripted: Scripted) -> None:
    completion = scripted([X_, *EOS.encode(), X_], stop=EOS)
    assert end(completion) == ("stop", EOS, [X_, *EOS.encode()], "x")


def test_stop_string_of_split_characters(scripted: Scripted) -> None:
    completion = scripted([X_, *"木🍎".encode(), X_], stop="🍎")
    assert end(completion) == ("stop", "🍎", [X_, *"木🍎".encode()], "x木")


def test_stop_string_inside_one_token(scripted: Scripted) -> None:
    assert end(scripted([X_, ND_BAR, X_], stop=" b")) == ("stop", " b", [X_, ND_BAR], "xND")


# ---- against length


def test_stop_wins_at_the_last_token(scripted: Scripted) -> None:
    assert end(scripted([X_, E_, N_, D_], stop="END"))[0] == "stop"
    assert end(scripted([X_, EOS_ID]))[0] == "stop"
    assert end(scripted([X_, N_], stop_token_ids=[N_]))[0] == "stop"


def test_length_wins_one_token_before_the_stop(scripted: Scripted) -> None:
    assert end(scripted([X_, E_, N_, D_], stop="END", max_tokens=3)) == ("length", None, [X_, E_, N_], "xEN")
    assert end(scripted([X_, X_, EOS_ID], max_tokens=2))[0] == "length"


# ---- min_tokens


def test_eos_is_masked_below_min_tokens(scripted: Scripted) -> None:
    completion = scripted([EOS_ID] * 6, min_tokens=3)
    assert completion.token_ids[3:] == [EOS_ID]
    assert EOS_ID not in completion.token_ids[:3]
    assert completion.finish_reason == "stop"


def test_stop_id_below_min_tokens_does_not_end(scripted: Scripted) -> None:
    completion = scripted([N_, N_, X_, N_, X_], stop_token_ids=[N_], min_tokens=3)
    assert end(completion) == ("stop", N_, [N_, N_, X_, N_], "NNxN")


def test_stop_id_that_completes_min_tokens_ends(scripted: Scripted) -> None:
    completion = scripted([N_, X_, N_, X_], stop_token_ids=[N_], min_tokens=3)
    assert end(completion) == ("stop", N_, [N_, X_, N_], "NxN")


def test_stop_string_below_min_tokens_does_not_end(scripted: Scripted) -> None:
    completion = scripted([E_, N_, D_, X_, E_, N_, D_, X_], stop="END", min_tokens=4)
    assert end(completion) == ("stop", "END", [E_, N_, D_, X_, E_, N_, D_], "ENDx")


def test_stop_string_that_completes_min_tokens_ends(scripted: Scripted) -> None:
    completion = scripted([X_, E_, N_, D_, X_], stop="END", min_tokens=4)
    assert end(completion) == ("stop", "END", [X_, E_, N_, D_], "x")


def test_min_tokens_equal_to_max_tokens(scripted: Scripted) -> None:
    completion = scripted([EOS_ID] * 4, min_tokens=4)
    assert completion.finish_reason == "length"
    assert EOS_ID not in completion.token_ids


# ---- without a tokenizer


def test_eos_of_config_json_ends(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Count", eos_token_id=[9, 20], scheduling__async_scheduling=ahead)
    completion = llm.generate([5], SamplingParams(temperature=0))[0].outputs[0]
    assert end(completion) == ("stop", None, [6, 7, 8, 9], "")
    assert_clean(llm)
