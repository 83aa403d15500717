"""Dense models with a plugin's regions in place of their parts, against transformers and in the plan."""

from __future__ import annotations

import pytest
import test_dense_parity
from test_dense_parity import WHOLE, Pair, prompts
from toys.region_plugin import CALLS

from deepinfer_core import LLM

pair = test_dense_parity.pair
PLUGIN = ("toys.region_plugin",)


def slots(llm: LLM) -> set[str]:
    return {choice.slot for choice in llm.engine.planned.plan.choices}


def test_regions_compute_what_their_parts_do(pair: Pair) -> None:
    """In every step and layer, and nothing of the parts is built."""
    with pair.open(plugins__paths=PLUGIN) as llm:
        kinds = set(llm.engine.model.config.kinds)  # type: ignore[attr-defined]
        layers = llm.engine.model.config.layers  # type: ignore[attr-defined]
        CALLS.clear()
        for output in llm.generate(prompts(1, 2, 23, 60), WHOLE):
            pair.check(output, prompt=True)
        assert CALLS["fused.attention_inputs"] == CALLS["fused.gated_linear"]
        assert CALLS["fused.gated_linear"] % layers == 0
        assert CALLS["fused.gated_linear"] >= 4 * layers
        assert {"gated_linear", *(f"attention_inputs_{kind}" for kind in kinds)} <= slots(llm)
        gone = {"gate_up", "swiglu", "rope", "head_norm", *(f"write_kv_{kind}" for kind in kinds)}
        assert not gone & slots(llm)
        assert all(not hasattr(llm.engine.ops, name) for name in gone)
        assert {choice.slot for choice in llm.engine.planned.plan.declined} == {"sample_tokens"}


@pytest.mark.parametrize("pair", ["qwen3-sliding"], indirect=True)
def test_a_layer_kind_whose_region_is_refused_runs_on_its_parts(pair: Pair) -> None:
    with pair.open(plugins__paths=PLUGIN, ops={"attention_inputs_window": ["parts"]}) as llm:
        CALLS.clear()
        for output in llm.generate(prompts(5, 30), WHOLE):
            pair.check(output, prompt=True)
        assert 3 * CALLS["fused.attention_inputs"] == CALLS["fused.gated_linear"] > 0
        assert {"attention_inputs_full", "rope", "head_norm", "write_kv_window"} <= slots(llm)
        assert "write_kv_full" not in slots(llm)
        declined, _ = llm.engine.planned.plan.declined
        assert (declined.slot, declined.source) == ("attention_inputs_window", "user")


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_demand_that_a_region_does_not_meet_is_met_by_its_parts(pair: Pair) -> None:
    with pair.open(plugins__paths=PLUGIN, features__batch_invariant=True) as llm:
        assert {"gate_up", "swiglu", "rope", "write_kv_full"} <= slots(llm)
        reasons = {
            loser.provider: loser.reason
            for choice in llm.engine.planned.plan.declined
            for loser in choice.losers
            if loser.provider.startswith("region_plugin:")
        }
        assert reasons == dict.fromkeys(
            ("region_plugin:attention_inputs", "region_plugin:gated_linear"), "lacks: batch_invariant"
        )
        (output,) = llm.generate(prompts(9), WHOLE)
        pair.check(output, prompt=True)
