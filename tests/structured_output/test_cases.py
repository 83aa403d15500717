"""Failures seen in other engines, each on both libraries: what a grammar does at its end, what it silently drops,
recursion, invalid constraints, padded vocabularies."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grammar_engines import LIBRARIES, constrained, grammar_llm
from grammar_vocabularies import EOS, compiler, open_ids, spec, start, walks
from toys.checkpoints import EOS_ID, ToyLLM
from toys.checks import assert_clean, facts
from toys.drafters import TOLD
from toys.oracle import count_tokens

from deepinfer_core import SamplingParams
from deepinfer_core.api import InvalidRequestError

A, B, C = b"abc"


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("grammar", "reason"), [('root ::= "a" b', "Rule 'b'"), ('root ::= ("a"', "Expect"), ('start ::= "a"', "root")]
)
def test_a_grammar_that_cannot_be_read_is_named_with_each_librarys_reason(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler().compile(spec(ebnf=grammar))
    text = str(caught.value)
    assert text.startswith(f"EBNF grammar {grammar!r}: ")
    assert reason in text
    assert text.index("(xgrammar)") < text.index("(llguidance)")


# ---- a terminated grammar is asked for nothing (vllm-project/vllm#42619)


def test_rows_of_a_draft_path_that_runs_past_the_end(library: str) -> None:
    state = start(library, regex="cb")
    everything = list(range(320))
    rows = open_ids(state, [C, B, EOS, C, C])
    assert rows == [[C], [B], [EOS], everything, everything, everything]
    assert state.accept([C, B, EOS, C, C]) == 3
    assert state.is_finished
    state.rollback(3)
    assert open_ids(state) == [[C]]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("drafts", [[C, B, EOS_ID, C, C], [C, B], [B], [C, C]])
def test_drafts_past_the_end_of_a_grammar(toy_llm: ToyLLM, library: str, drafts: list[int], ignore_eos: bool) -> None:
    TOLD.clear()
    TOLD[("0", 0)] = [7, *drafts, *[C] * 10]
    llm = grammar_llm(
        toy_llm,
        library,
        plugins__paths=["toys.plugin", "toys.drafter_plugin"],
        speculation__method="toy",
        structured_outputs__jump_forward=0,
        plugins__drafter_plugin={"knows": "told", "vocab": 320, "depth": 5},
    )
    (output,) = llm.generate([[7]], constrained(regex="cb", ignore_eos=ignore_eos))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, output.error) == ("cb", "stop", None)
    assert_clean(llm)


# ---- constraints are not dropped (mlc-ai/xgrammar#895)

COMBINED = [
    ({"type": "string", "pattern": "^[xy]+$", "maxLength": 2}, ['"xy"', '"x"'], ['"xyx"', '""']),
    ({"type": "string", "pattern": "^[0-9]*$", "minLength": 3}, ['"123"', '"12345"'], ['"12"', '""', '"abc"']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), COMBINED)
@pytest.mark.parametrize("nested", [False, True])
def test_pattern_and_length_together(schema: Any, good: list[str], bad: list[str], nested: bool) -> None:
    if nested:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        good, bad = [f"[{text}]" for text in good], [f"[{text}]" for text in bad]
    for library in ("routed", *LIBRARIES):
        names = LIBRARIES if library == "routed" else (library,)
        if library == "xgrammar":
            with pytest.raises(InvalidRequestError, match="'pattern', 'm"):
                start(library, json=schema)
            continue
        assert all(walks(start(*names, json=schema), text) for text in good)
        assert not any(walks(start(*names, json=schema), text) for text in bad)


# ---- recursion (mlc-ai/xgrammar#207)

LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}


def linked(depth: int) -> Any:
    return {"v": depth, "next": linked(depth - 1) if depth > 1 else None}


@pytest.mark.parametrize("depth", [1, 2, 5, 40])
def test_a_linked_list(library: str, depth: int) -> None:
    text = json.dumps(linked(depth))
    assert walks(start(library, json=LIST), text)
    broken = text.replace(', "next": null', "")
    assert not walks(start(library, json=LIST), broken)


def test_other_recursion(library: str) -> None:
    root = {
        "type": "object",
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert walks(start(library, json=root), '{"n": {"n": null}}')
    assert not walks(start(library, json=root), '{"n": 1}')
    mutual = {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}},
            "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}]},
        },
    }
    assert walks(start(library, json=mutual), "[1, [2, [[]]]]")
    assert not walks(start(library, json=mutual), "[null]")


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}])
def test_a_schema_that_only_refers_to_itself_ends(library: str, schema: Any) -> None:
    """It says nothing (every document is valid) or is refused; it neither hangs nor overflows a stack."""
    try:
        state = start(library, json=schema)
    except InvalidRequestError:
        return
    assert open_ids(state)[0]


@pytest.mark.parametrize("escaped", ["café", "caf\\u00e9"])
def test_spellings_of_a_letter_in_a_schema(library: str, escaped: str) -> None:
    schema = f'{{"const": "{escaped}"}}'
    assert walks(start(library, json=schema), '"café"')
    assert not walks(start(library, json=schema), '"caf?"')


# ---- an invalid constraint harms one request (vllm-project/vllm#17313)

INVALID = [
    {"regex": "("},
    {"regex": "[z-a]"},
    {"regex": "a(?=b)"},
    {"regex": r"\bfoo\b"},
    {"ebnf": 'root ::= "a" missing'},
    {"ebnf": 'root ::= ( "a"'},
    {"json": {"type": "not-a-type"}},
    {"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}},
    {"json": {"minimum": "x"}},
]


@pytest.mark.parametrize("bad", INVALID, ids=str)
def test_an_invalid_constraint_ends_its_request_alone(toy_llm: ToyLLM, library: str, ahead: bool, bad: Any) -> None:
    llm = grammar_llm(toy_llm, library, "Count", vocab_size=320, scheduling__async_scheduling=ahead)
    stream = llm.stream([1, 2], SamplingParams(temperature=0, max_tokens=30))
    tokens = [token for _ in range(3) for token in next(stream).token_ids]
    try:
        (output,) = llm.generate([[3]], SamplingParams(structured_outputs=bad))
    except InvalidRequestError as error:
        reason = str(error)
    else:
        assert output.error is not None
        assert (output.error.code, output.outputs[0].finish_reason) == ("constraint", "error")
        reason = output.error.message
    assert len(reason) > 40
    assert "\n" not in reason
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == count_tokens([1, 2], 30, 320)
    (after,) = llm.generate([[3]], constrained(regex="^cb$"))
    assert after.outputs[0].text == "cb"
    assert_clean(llm)


def test_text_that_is_no_json_is_no_schema() -> None:
    with pytest.raises(InvalidRequestError, match="is no JSON"):
        spec(json="{'a': 1}")


def test_anchors_change_nothing(library: str) -> None:
    for pattern in ("cb", "^cb$", "^cb", "cb$"):
        state = start(library, regex=pattern)
        assert walks(state, "cb"), pattern
    assert not walks(start(library, regex="^cb$"), "xcb")


@pytest.mark.parametrize("pattern", [r"\p{L}+", r"a\Wb", r"[^\w]", r"\Qa\E", r"\D"])
def test_an_escape_that_may_mean_something_else_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not known to mean the same"):
        start("xgrammar", regex=pattern)


# ---- masks are as wide as the logits (mlc-ai/xgrammar#694)


@pytest.mark.parametrize("padded", [261, 300, 319])
def test_padded_ids_lead_and_are_never_drawn(toy_llm: ToyLLM, library: str, ahead: bool, padded: int) -> None:
    logits = {str(padded): 99.0, str(ord("z")): 50.0, str(ord("b")): 1.0}
    llm = grammar_llm(toy_llm, library, "Const", logits=logits, scheduling__async_scheduling=ahead)
    for temperature in (0, 1, 2):
        (output,) = llm.generate([[1]], constrained(9, regex="[ab]+", temperature=temperature, seed=1))
        assert re.fullmatch("[ab]+", output.outputs[0].text)
        assert set(output.outputs[0].token_ids) <= {A, B, 257, EOS_ID}


def test_a_model_as_wide_as_its_tokenizer(toy_llm: ToyLLM, library: str) -> None:
    llm = grammar_llm(toy_llm, library, vocab_size=261)
    (output,) = llm.generate([[1]], constrained(9, regex="[ab]{6}"))
    assert re.fullmatch("[ab]{6}", output.outputs[0].text)


def test_both_libraries_in_one_batch(toy_llm: ToyLLM, ahead: bool) -> None:
    """EBNF goes to one, JSON to the other, and free text to neither."""
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    params = [
        constrained(seed=1, ebnf='root ::= "<" [a-c]{3} ">"'),
        constrained(seed=2, json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
        SamplingParams(max_tokens=7, seed=3),
        constrained(seed=4, choice=["red", "green"]),
    ]
    prompts = [[1], [2], [3], [4]]
    together = llm.generate(prompts, params)
    assert re.fullmatch("<[abc]{3}>", together[0].outputs[0].text)
    assert all(type(item) is bool for item in json.loads(together[1].outputs[0].text))
    assert together[3].outputs[0].text in ("red", "green")
    for prompt, one, output in zip(prompts, params, together, strict=True):
        assert facts(llm.generate([prompt], one)[0]) == facts(output)
    assert compiler().compile(spec(ebnf='root ::= "a"')).library == "xgrammar"
