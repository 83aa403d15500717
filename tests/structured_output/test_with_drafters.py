"""Grammars beside the drafters of deepinfer-spec-decode on demo-v4: the tokens that the model says without drafts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import jsonschema
import pytest

from deepinfer_core import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    find_spec("deepinfer_spec_decode") is None or find_spec("deepinfer_demo_v4") is None,
    reason="needs deepinfer-spec-decode and deepinfer-demo-v4",
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ["def f(x):\n", "A person as JSON: ", "import os\n"]
DRAFTERS = {
    "ngram": {"speculation.method": "ngram"},
    "mtp": {"speculation.method": "mtp", "plugins.spec_decode.drafter": "demo-v4-mtp"},
    "dspark": {"speculation.method": "dspark", "plugins.spec_decode.drafter": "demo-v4-dspark"},
    "dflash": {"speculation.method": "dspark", "plugins.spec_decode.drafter": "demo-v4-dflash"},
}


def texts(temperature: float, **settings: Any) -> list[Any]:
    """Two requests with the grammar around one without, seeded where they are drawn."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=48,
            structured_outputs=None if number == 2 else {"json": SCHEMA},
        )
        for number in range(3)
    ]
    config = {"logging.progress": False, "logging.level": "error", **settings}
    with LLM("demo-v4", accelerator="cpu", config=config) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
    assert [output.error for output in outputs] == [None] * 3
    return [output.outputs[0] for output in outputs]


def check(drafter: str, temperature: float, **settings: Any) -> None:
    expected = texts(temperature)
    found = texts(temperature, **DRAFTERS[drafter], **{"speculation.max_draft_tokens": 4}, **settings)
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    for text in found[:2]:
        assert text.finish_reason == "stop"
        jsonschema.validate(json.loads(text.text), SCHEMA)


@pytest.mark.parametrize("drafter", ["ngram", "dspark"])
def test_a_drafter_changes_no_token_of_a_grammar(drafter: str) -> None:
    check(drafter, 1.0, **{"scheduling.async_scheduling": True})


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("schedule", ["fixed", "confidence"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_changes_a_token(drafter: str, schedule: str, ahead: bool, temperature: float) -> None:
    check(drafter, temperature, **{"speculation.schedule": schedule, "scheduling.async_scheduling": ahead})
