"""Settings of features that are not there are refused, and window retention does what it says."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, PluginError


def test_a_compiler_of_grammars_that_nobody_has_is_refused(toy_llm: ToyLLM) -> None:
    with pytest.raises(PluginError, match="no loaded plugin has constraint 'acme'"):
        toy_llm("Count", structured_outputs__backend="acme")


@pytest.mark.parametrize(("retention", "cached"), [("full", 8), ("minimal", 0)])
def test_retention_decides_whether_a_passed_prefix_can_be_continued(
    toy_llm: ToyLLM, retention: str, cached: int
) -> None:
    """A window of 4 slides over a prompt of 24; a second prompt shares its first 8 tokens."""
    llm = toy_llm(
        "PrefixHash",
        groups={"full": None, "win": 4},
        kv_cache__window_retention=retention,
        scheduling__max_batch_tokens=16,
    )
    greedy = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([list(range(24))], greedy)
    shared: list[int] = [*range(8), 60, 61, 62]
    (again,) = llm.generate([shared], greedy)
    assert again.metrics.cached_tokens == cached
    cold: Any = toy_llm("PrefixHash", groups={"full": None, "win": 4}, kv_cache__prefix_cache=False)
    assert again.outputs[0].token_ids == cold.generate([shared], greedy)[0].outputs[0].token_ids


def test_a_configuration_of_another_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^config=3: expected a file's name, a mapping of settings, or"):
        LLM("demo", config=3)  # type: ignore[arg-type]
