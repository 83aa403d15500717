"""Grammars that begin after a sequence of tokens, and tags in free text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepinfer_structured_output.trigger import failure_function
from grammar_vocabularies import EOS, LIBRARIES, TOKENS, compiler, encode, open_ids, spec, start, walks
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConstraintState

each_library = pytest.mark.parametrize("library", LIBRARIES)
A, B, C = b"abc"


def triggered(library: str, trigger: list[int], bound: int | None = None, regex: str = "[0-9]{2}") -> ConstraintState:
    arguments = {"schema_type": "regex", "schema": regex, "trigger_token_ids": trigger, "bound_token_id": bound}
    found = SamplingParams(so_args=arguments).structured_outputs
    assert found is not None
    return compiler(library).compile(found).start(found)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_failure_function_is_the_longest_border(pattern: list[int]) -> None:
    borders = [
        max(k for k in range(i + 1) if pattern[:k] == pattern[i + 1 - k : i + 1] and k <= i)
        for i in range(len(pattern))
    ]
    assert failure_function(pattern) == borders


@each_library
@settings(max_examples=40)
@given(
    trigger=st.lists(st.sampled_from([A, B]), min_size=1, max_size=4),
    text=st.lists(st.sampled_from([A, B, C]), max_size=14),
)
def test_the_grammar_begins_where_the_trigger_first_ended(library: str, trigger: list[int], text: list[int]) -> None:
    ends = [i for i in range(len(trigger), len(text) + 1) if text[i - len(trigger) : i] == trigger]
    free = min(ends, default=len(text))
    state = triggered(library, trigger)
    assert state.accept(text) == free  # letters are no digits
    if ends:
        assert open_ids(state)[0] == [*range(ord("0"), ord("9") + 1), TOKENS.index(b"12")]
        assert not state.is_complete
        assert state.accept([ord("1"), ord("2")]) == 2
        assert state.is_finished
        state.rollback(2 + free)
    else:
        assert open_ids(state)[0] == list(range(len(TOKENS)))
        assert state.is_complete
        state.rollback(free)
    assert open_ids(state)[0] == list(range(len(TOKENS)))


@each_library
@pytest.mark.parametrize(
    ("trigger", "bound", "before", "rest"),
    [([A, B, C], A, [], [B, C]), ([A, B, C], ord("x"), [], [A, B, C]), ([A, A, B], A, [A], [B])],
)
def test_a_bound_token_forces_the_rest_of_the_trigger(
    library: str, trigger: list[int], bound: int, before: list[int], rest: list[int]
) -> None:
    state = triggered(library, trigger, bound)
    if before:  # the first A binds already, and the second is the rest of it
        assert state.accept(before) == 1
        assert list(state.forced(9)) == [A, B]
    assert state.accept([bound]) == 1
    assert list(state.forced(9)) == rest
    assert not state.is_complete
    rows = open_ids(state, rest)
    assert rows[:-1] == [[token] for token in rest]
    assert EOS not in rows[-1]
    assert state.accept([EOS]) == 0
    assert state.accept(rest) == len(rest)
    assert state.accept([ord("7")]) == 1
    state.rollback(1 + len(rest) + 1 + len(before))
    assert EOS in open_ids(state)[0]


@each_library
def test_free_text_may_end_and_be_rolled_back(library: str) -> None:
    state = triggered(library, [A, B])
    assert state.accept([C, EOS]) == 2
    assert state.is_finished
    assert state.accept([A]) == 0
    state.rollback(1)
    assert state.accept([A, B, ord("1"), C]) == 3


# ---- structural tags

TAGS: dict[str, Any] = {
    "structures": [
        {
            "begin": "<f=get>",
            "schema": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            },
            "end": "</f>",
        },
        {"begin": "<f=say>", "schema": {"type": "string"}, "end": "</f>"},
        {"begin": "[[", "schema": {"enum": [1, 2]}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}


@each_library
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("free text, even < or f=", True),
        ("", True),
        ('so <f=get>{"n": 12}</f> then', True),
        ('<f=say>"x <f= y"</f><f=get>{"n": 1}</f>[[2]]', True),
        ('<f=get>{"n": "x"}</f>', False),
        ("<f=put>1</f>", False),
        ("a [[3]]", False),
        ('<f=get>{"n": 12}</g>', False),
        ('<f=get>{"n": 12}', False),
    ],
)
def test_tags_in_free_text(library: str, text: str, right: bool) -> None:
    assert walks(start(library, structural_tags=TAGS), text) == right


@each_library
def test_what_begins_a_tag_forces_the_rest(library: str) -> None:
    only = {"structures": TAGS["structures"][:1], "triggers": ["<f="]}
    state = start(library, structural_tags=only)
    state.accept(encode("so <f="))
    forced = b"".join(TOKENS[token] for token in state.forced(32))
    assert forced
    assert b'get>{"n": '.startswith(forced)


def test_tags_are_checked_like_schemas() -> None:
    bad = json.loads(json.dumps(TAGS))
    bad["structures"][0]["schema"] = {"not": {"const": 1}}
    with pytest.raises(ValueError, match="'not'"):
        compiler().check(spec(structural_tags=bad))
