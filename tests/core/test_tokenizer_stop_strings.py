"""StopMatcher against a regular expression over the whole text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.api import InvalidRequestError
from deepinfer_core.tokenizer.stop_strings import StopMatcher

pieces_of_text = st.lists(st.text("aab", max_size=3), max_size=12)
stop_strings = st.lists(st.text("aab", min_size=1, max_size=5), max_size=4)


def run(pieces: list[str], stop: list[str], *, include: bool = False, first_token: int = 0) -> tuple[StopMatcher, str]:
    matcher = StopMatcher(stop, include_stop=include, first_token=first_token)
    text = "".join(matcher.feed(piece, number) for number, piece in enumerate(pieces, 1))
    return matcher, text + matcher.finish()


def leftmost_longest(text: str, stop: list[str]) -> re.Match[str] | None:
    """Alternatives are tried in order, so the longest comes first."""
    pattern = "|".join(re.escape(one) for one in sorted(stop, key=len, reverse=True))
    return re.search(pattern, text) if stop else None


@given(pieces=pieces_of_text, stop=stop_strings, include=st.booleans())
@settings(max_examples=400)
def test_the_result_depends_on_the_text_alone(pieces: list[str], stop: list[str], include: bool) -> None:
    matcher, text = run(pieces, stop, include=include)
    whole = "".join(pieces)
    match = leftmost_longest(whole, stop)
    if match is None:
        assert (matcher.stopped, matcher.stop_token_count, text) == (None, None, whole)
    else:
        assert matcher.stopped == match[0]
        assert text == whole[: match.end() if include else match.start()]
        shortest = next(n for n in range(len(pieces) + 1) if len("".join(pieces[:n])) >= match.end())
        assert matcher.stop_token_count == shortest


@given(pieces=pieces_of_text, stop=stop_strings, first_token=st.integers(0, 8))
@settings(max_examples=400)
def test_occurrences_completed_too_early_do_not_count(pieces: list[str], stop: list[str], first_token: int) -> None:
    matcher, _ = run(pieces, stop, first_token=first_token)
    whole = "".join(pieces)
    number = [n for n, piece in enumerate(pieces, 1) for _ in piece]
    allowed = [
        (start, -len(one), one)
        for one in stop
        for start in range(len(whole) - len(one) + 1)
        if whole.startswith(one, start) and number[start + len(one) - 1] >= first_token
    ]
    assert matcher.stopped == (min(allowed)[2] if allowed else None)


@given(pieces=pieces_of_text, stop=stop_strings)
@settings(max_examples=200)
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(stop, include_stop=False, first_token=0)
    given_out = fed = ""
    for number, piece in enumerate(pieces, 1):
        given_out += matcher.feed(piece, number)
        fed += piece
        if matcher.stopped is None:
            held = fed.removeprefix(given_out)
            assert not held or any(one.startswith(held) or held.startswith(one) for one in stop)
            assert len(held) < max(map(len, stop), default=1)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop: an empty string"):
        StopMatcher(["a", ""], include_stop=False, first_token=0)


def test_nothing_is_held_without_stop_strings() -> None:
    matcher = StopMatcher([], include_stop=False, first_token=0)
    assert matcher.feed("abc", 1) == "abc"
    assert matcher.finish() == ""
