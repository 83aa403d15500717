"""What the contract promises of states and masks, for both libraries."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from grammar_vocabularies import EOS, LIBRARIES, TOKENS, WIDTH, encode, filler, grammar, open_ids, spec, start, walks
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.api import ConstraintState, MaskJob

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ab", "the foo", "a"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
EXPRESSION = 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"\n'
GRAMMARS: dict[str, Any] = {
    "json": {"json": PERSON},
    "object": {"json_object": True},
    "regex": {"regex": "(ab|foo )+[0-9]{1,3}(true|null)?"},
    "ebnf": {"ebnf": EXPRESSION},
    "choice": {"choice": ["ab", "abab", "the name", "12", "héé", 'a"b\\c\n.*']},
}


each_library = pytest.mark.parametrize("library", LIBRARIES)


def advance(state: ConstraintState, picks: list[int], most: int = 40) -> list[int]:
    """Walk by choices among the open tokens."""
    taken: list[int] = []
    for pick in picks[:most]:
        if state.is_finished:
            break
        opened = open_ids(state)[0]
        token = opened[pick % len(opened)]
        assert state.accept([token]) == 1
        taken.append(token)
    return taken


NAMES = st.sampled_from(sorted(GRAMMARS))
PICKS = st.lists(st.integers(0, 10**6), max_size=25)
WALKS = given(name=NAMES, picks=PICKS, data=st.data())


@each_library
@settings(max_examples=60)
@WALKS
def test_rollback_undoes_accept(library: str, name: str, picks: list[int], data: st.DataObject) -> None:
    state = start(library, **GRAMMARS[name])
    seen = []
    taken = []
    for pick in picks:
        seen.append((open_ids(state) if not state.is_finished else [], state.is_complete, list(state.forced(9))))
        step = advance(state, [pick])
        if not step:
            break
        taken += step
    back = data.draw(st.integers(0, len(taken)))
    state.rollback(back)
    if back:
        masks, complete, forced = seen[len(taken) - back]
        assert (open_ids(state), state.is_complete, list(state.forced(9))) == (masks, complete, forced)
    assert state.accept(taken[len(taken) - back :]) == back


@each_library
@settings(max_examples=60)
@WALKS
def test_masks_of_a_draft_path_are_those_of_single_steps(
    library: str, name: str, picks: list[int], data: st.DataObject
) -> None:
    state = start(library, **GRAMMARS[name])
    probe = start(library, **GRAMMARS[name])
    before = advance(state, picks[:5])
    probe.accept(before)
    if state.is_finished:
        return
    drafts = advance(probe, picks[5:])
    probe.rollback(len(drafts))
    drafts += data.draw(st.lists(st.integers(0, len(TOKENS) - 1), max_size=3))
    together = open_ids(state, drafts)
    for row, draft in zip(together, [*drafts, None], strict=True):
        if state.is_finished:
            break
        assert row == open_ids(state)[0]
        if draft is None or not state.accept([draft]):
            break
    state.rollback(0)


@each_library
@settings(max_examples=60)
@WALKS
def test_a_mask_opens_exactly_what_is_legal(library: str, name: str, picks: list[int], data: st.DataObject) -> None:
    """Unless tokens are forced: then one spelling of the forced text is open, and others would be legal."""
    state = start(library, **GRAMMARS[name])
    advance(state, picks)
    if state.is_finished:
        assert state.accept([data.draw(st.integers(0, EOS - 1))]) == 0
        return
    opened = open_ids(state)[0]
    legal = []
    for token in range(len(TOKENS)):
        if state.accept([token]):
            legal.append(token)
            state.rollback(1)
    assert (EOS in opened) == state.is_complete
    forced = list(state.forced(5))
    if forced:
        assert opened == forced[:1]
        assert set(forced[:1]) <= set(legal)
    else:
        assert opened == legal


@each_library
@settings(max_examples=60)
@WALKS
def test_forced_tokens_are_each_the_only_one_open(
    library: str, name: str, picks: list[int], data: st.DataObject
) -> None:
    state = start(library, **GRAMMARS[name])
    advance(state, picks)
    forced = list(state.forced(data.draw(st.integers(1, 9))))
    if forced:
        rows = open_ids(state, forced)
        assert rows[: len(forced)] == [[token] for token in forced]
        assert state.accept(forced) == len(forced)


@each_library
@settings(max_examples=40)
@given(picks=st.lists(st.integers(0, 10**6), max_size=12), name=st.sampled_from(["regex", "ebnf", "choice", "json"]))
def test_finished_means_that_only_the_end_is_open(library: str, picks: list[int], name: str) -> None:
    state = start(library, **GRAMMARS[name])
    if EOS in advance(state, picks):
        assert state.accept([EOS]) == 0
        state.rollback(1)
    if state.accept([EOS]):
        assert state.is_finished
        state.rollback(1)
        assert state.is_finished == (open_ids(state)[0] == [EOS])
    else:
        assert not state.is_complete
        assert not state.is_finished


@each_library
def test_special_and_padded_ids_are_never_open(library: str) -> None:
    state = start(library, regex="(.|\n)*")
    opened = open_ids(state)[0]
    assert max(opened) < len(TOKENS) < WIDTH
    assert EOS in opened
    assert state.accept([len(TOKENS), WIDTH - 1]) == 0


@each_library
def test_a_batch_is_filled_as_its_rows_are(library: str) -> None:
    states = [start(library, **GRAMMARS[name]) for name in sorted(GRAMMARS) for _ in range(3)]
    for index, state in enumerate(states):
        advance(state, list(range(index % 4)))
    states = [state for state in states if not state.is_finished]
    alone = [open_ids(state)[0] for state in states]
    masks = np.full((len(states) + 2, WIDTH // 32), -1, np.int32)
    filler().fill([MaskJob(state, row + 1) for row, state in enumerate(states)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert [np.nonzero(row)[0].tolist() for row in bits[1:-1]] == alone
    assert bits[[0, -1]].all()


@each_library
@pytest.mark.parametrize("name", sorted(GRAMMARS))
def test_known_sentences_walk_the_masks(library: str, name: str) -> None:
    sentences = {
        "json": [json.dumps(v) for v in ({"name": "foo ", "age": 12, "tags": []}, {"name": "", "tags": ["ab", "a"]})],
        "object": ["{}", json.dumps({"name": [1, None, {"x": "the \\"}], "ab": -1.5e3})],
        "regex": ["ab12", "foo ab1true", "ababfoo 123null"],
        "ebnf": ["1", "(12+3)-(4-(5))", "12+1"],
        "choice": GRAMMARS["choice"]["choice"] if name == "choice" else [],
    }[name]
    for sentence in sentences:
        assert walks(start(library, **GRAMMARS[name]), sentence), sentence


def test_both_libraries_agree_on_the_words_of_a_grammar() -> None:
    found = spec(ebnf=EXPRESSION)
    for text, right in (("1+(2-3)", True), ("(1", False), ("", False), ("1++2", False), ("((7))", True)):
        for library in LIBRARIES:
            state = grammar(library, ebnf=EXPRESSION).start(found)
            ids = encode(text)
            assert (state.accept(ids) == len(ids) and state.is_complete) == right
