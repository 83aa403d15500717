"""No hook is called inside a step, and nothing can join the registry once the engine runs."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checks import ids_of

from deepinfer_core import SamplingParams
from deepinfer_core.api import PluginError
from deepinfer_core.plugins.registry import LoadedPlugin


@pytest.mark.parametrize("ahead", [False, True])
def test_no_hook_inside_a_step(toy_llm: Any, ahead: bool) -> None:
    llm = toy_llm("Const", tokenizer=True, scheduling__async_scheduling=ahead)
    everything = SamplingParams(
        n=2, max_tokens=6, seed=1, top_k=5, top_p=0.9, min_p=0.01, temperature=0.7, presence_penalty=0.5, stop=["zz"],
        bad_words=["q"], allowed_token_ids=[3, 5, 7], logit_bias={3: 1.0}, logprobs=3, prompt_logprobs=2, min_tokens=3,
    )  # fmt: skip
    registry = llm.engine.planned.registry
    with registry.no_hooks():
        outputs = llm.generate([[3, 5], [7]], everything)
        with pytest.raises(RuntimeError, match="hook"):
            registry.manager.hook.deepinfer_plugin()
    assert [len(ids) for ids in ids_of(outputs)] == [6, 6]


def test_the_registry_is_frozen(toy_llm: Any) -> None:
    registry = toy_llm("Count").engine.planned.registry
    toys = registry.plugins["toys"]
    with pytest.raises(PluginError, match="frozen"):
        registry.register(object(), LoadedPlugin(info=toys.info, record=toys.record, path="", asked=True))
