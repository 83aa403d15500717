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


@pytest.mark.parametrize("between", [True, False])
def test_regions_compute_what_their_parts_do(pair: Pair, between: bool) -> None:
    """In every step and layer, and nothing of the parts is built. The widest region has the gated layer within it."""
    refused = {} if between else {"ops": {"between_attention": ["parts"]}}
    wider, within = ("between_attention", "gated_linear") if between else ("gated_linear", "between_attention")
    with pair.open(plugins__paths=PLUGIN, **refused) as llm:
        kinds = set(llm.engine.model.config.kinds)  # type: ignore[attr-defined]
        layers = llm.engine.model.config.layers  # type: ignore[attr-defined]
        CALLS.clear()
        for output in llm.generate(prompts(1, 2, 23, 60), WHOLE):
            pair.check(output, prompt=True)
        assert CALLS["fused.attention_inputs"] == CALLS[f"fused.{wider}"]
        assert CALLS[f"fused.{wider}"] % layers == 0
        assert CALLS[f"fused.{wider}"] >= 4 * layers
        assert not CALLS[f"fused.{within}"]
        assert {wider, *(f"attention_inputs_{kind}" for kind in kinds)} <= slots(llm)
        gone = {"gate_up", "swiglu", "rope", "head_norm", *(f"write_kv_{kind}" for kind in kinds), within}
        gone |= {"norm", "qkv", "attention_out", "down"} if between else set()
        assert not gone & slots(llm)
        assert all(not hasattr(llm.engine.ops, name) for name in gone)
        declined = {choice.slot: choice.reason for choice in llm.engine.planned.plan.declined}
        assert set(declined) == {"sample_tokens", within}
        assert declined[within] == ("a part of between_attention" if between else 'ops."between_attention" says so')


@pytest.mark.parametrize("pair", ["qwen3-sliding"], indirect=True)
def test_a_layer_kind_whose_region_is_refused_runs_on_its_parts(pair: Pair) -> None:
    with pair.open(plugins__paths=PLUGIN, ops={"attention_inputs_window": ["parts"]}) as llm:
        CALLS.clear()
        for output in llm.generate(prompts(5, 30), WHOLE):
            pair.check(output, prompt=True)
        assert 3 * CALLS["fused.attention_inputs"] == CALLS["fused.between_attention"] > 0
        assert {"attention_inputs_full", "rope", "head_norm", "write_kv_window"} <= slots(llm)
        assert "write_kv_full" not in slots(llm)
        declined = {choice.slot: choice.source for choice in llm.engine.planned.plan.declined}
        assert declined == {"attention_inputs_window": "user", "gated_linear": "score", "sample_tokens": "score"}


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_whoever_names_the_gated_layer_gets_it(pair: Pair) -> None:
    """An explicit request for a region is met, though a wider one would take its place."""
    with pair.open(plugins__paths=PLUGIN, ops={"fused.gated_linear": ["region_plugin"]}) as llm:
        assert {"gated_linear", "norm", "qkv", "attention_out", "down"} <= slots(llm)
        declined = {choice.slot: choice.reason for choice in llm.engine.planned.plan.declined}
        assert declined["between_attention"] == 'ops."fused.gated_linear" names a part'


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
            ("region_plugin:attention_inputs", "region_plugin:between_attention", "region_plugin:gated_linear"),
            "lacks: batch_invariant",
        )
        (output,) = llm.generate(prompts(9), WHOLE)
        pair.check(output, prompt=True)
