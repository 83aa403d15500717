"""Regions against their parts: who serves, why, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from deepinfer_core.api import (
    GatedLinearRequest,
    LazyRef,
    LinearRequest,
    OpRequest,
    PlanError,
    Provider,
    Region,
    SwigluRequest,
    no,
    yes,
)
from deepinfer_core.plugins import ChosenRegions, choose_regions

LINEAR = {"in_features": 8, "dtype": "float32", "weight_dtype": "float32"}
OPS: Mapping[str, OpRequest] = {
    "gate_up": LinearRequest(out_features=12, out_dtype="float32", **LINEAR),
    "other_gate_up": LinearRequest(out_features=24, out_dtype="float32", **LINEAR),
    "swiglu": SwigluRequest(width=6, dtype="float32"),
    "out": LinearRequest(out_features=8, out_dtype="float32", **LINEAR),
}


def region(*replaces: str, **changes: Any) -> Region:
    request = GatedLinearRequest(width=6, **LINEAR)
    return Region(request=attrs.evolve(request, **changes), replaces=replaces)


ONE = {"gated": region("gate_up", "swiglu")}
TWO = {"gated": region("gate_up", "swiglu"), "other": region("other_gate_up", "swiglu", demands={"batch_invariant"})}


def provider(name: str, score: int | None = 90, **changes: Any) -> tuple[str, Provider]:
    verdict = no("too narrow") if score is None else yes(score)
    made = Provider(name=name, op="fused.gated_linear", build=LazyRef("x:y"), supports=lambda _: verdict)
    return "acme", attrs.evolve(made, **changes)


REFERENCE = ("reference", attrs.evolve(provider("gated_linear", 0)[1], fallback=True))


def decide(
    providers: Sequence[tuple[str, Provider]],
    regions: Mapping[str, Region] = ONE,
    user: Mapping[str, Sequence[str]] | None = None,
) -> ChosenRegions:
    return choose_regions(regions, OPS, [*providers, REFERENCE], user=user or {}, backend_plugin="acme")


def test_an_eligible_region_outranks_its_parts() -> None:
    found = decide([provider("fast")])
    (choice,) = found.chosen
    assert (choice.slot, choice.provider, choice.source) == ("gated", "acme:fast", "score")
    assert choice.replaces == ("gate_up", "swiglu")
    assert choice.reason == "in place of gate_up, swiglu"
    assert found.left == {"other_gate_up", "out"}
    assert not found.declined


def test_the_reference_is_no_reason_to_use_a_region() -> None:
    found = decide([])
    (declined,) = found.declined
    assert (declined.provider, declined.source, found.chosen) == ("parts", "score", ())
    assert declined.reason == "no plugin's provider is eligible"
    assert [(loser.provider, loser.reason) for loser in declined.losers] == [
        ("reference:gated_linear", "reference: its parts are the same")
    ]
    assert found.left == set(OPS)


@pytest.mark.parametrize(
    ("offered", "why"),
    [(provider("fast", None), "too narrow"), (provider("fast", on_request=True), "only on request")],
)
def test_what_is_not_eligible_says_why(offered: tuple[str, Provider], why: str) -> None:
    (declined,) = decide([offered]).declined
    assert {loser.provider: loser.reason for loser in declined.losers}["acme:fast"] == why


def test_a_part_of_two_regions_stays_until_both_are_chosen() -> None:
    found = decide([provider("fast")], TWO)
    assert [c.slot for c in found.chosen] == ["gated"]
    assert {loser.reason for c in found.declined for loser in c.losers if loser.provider == "acme:fast"} == {
        "lacks: batch_invariant"
    }
    assert found.left == {"other_gate_up", "swiglu", "out"}
    both = decide([provider("fast", caps=frozenset({"batch_invariant"}))], TWO)
    assert both.left == {"out"}


NESTED = {"wide": region("gate_up", "swiglu", "out"), "gated": region("gate_up", "swiglu")}


def test_a_region_within_one_before_it_is_a_part_of_it() -> None:
    found = decide([provider("fast")], NESTED)
    assert [c.slot for c in found.chosen] == ["wide"]
    (declined,) = found.declined
    assert (declined.slot, declined.provider, declined.source) == ("gated", "parts", "score")
    assert declined.reason == "a part of wide"
    assert found.left == {"other_gate_up"}


def test_a_region_within_one_that_is_refused_serves() -> None:
    found = decide([provider("fast")], NESTED, user={"wide": ["parts"]})
    assert [c.slot for c in found.chosen] == ["gated"]
    assert found.left == {"other_gate_up", "out"}


@pytest.mark.parametrize("wanted", ["acme:fast", "parts"])
def test_whoever_names_the_region_within_gets_it(wanted: str) -> None:
    found = decide([provider("fast")], NESTED, user={"gated": [wanted]})
    assert [c.slot for c in found.chosen] == (["gated"] if wanted != "parts" else [])
    assert found.declined[0].reason == 'ops."gated" names a part'


def test_naming_both_regions_means_the_wider() -> None:
    found = decide([provider("fast")], NESTED, user={"gated": ["acme"], "wide": ["acme"]})
    assert [c.slot for c in found.chosen] == ["wide"]


@pytest.mark.parametrize("key", ["gated", "fused.gated_linear"])
def test_a_user_refuses_a_region(key: str) -> None:
    found = decide([provider("fast")], user={key: ["parts"]})
    (declined,) = found.declined
    assert (declined.source, declined.reason) == ("user", f'ops."{key}" says so')
    assert found.left == set(OPS)


@pytest.mark.parametrize("key", ["swiglu", "pointwise.swiglu", "gemm.linear"])
def test_whoever_names_a_part_gets_the_parts(key: str) -> None:
    (declined,) = decide([provider("fast")], user={key: ["reference"]}).declined
    assert declined.reason == f'ops."{key}" names a part'


def test_naming_both_means_the_region() -> None:
    found = decide([provider("fast")], user={"gated": ["acme"], "pointwise.swiglu": ["reference"]})
    assert [c.source for c in found.chosen] == ["user"]


def test_a_user_may_name_the_reference() -> None:
    (choice,) = decide([provider("fast")], user={"gated": ["reference"]}).chosen
    assert choice.provider == "reference:gated_linear"


def test_what_a_user_names_is_met_or_an_error_unless_the_list_ends_in_parts() -> None:
    refused = [provider("fast", None)]
    with pytest.raises(PlanError, match=r'ops\."gated" = .*acme:fast: too narrow'):
        decide(refused, user={"gated": ["acme:fast"]})
    (declined,) = decide(refused, user={"gated": ["acme:fast", "parts"]}).declined
    assert "too narrow" in declined.reason
    assert decide([provider("fast")], user={"gated": ["acme:fast", "parts"]}).chosen


def test_equal_scores_are_the_users_to_decide() -> None:
    with pytest.raises(PlanError, match="equal scores"):
        decide([provider("fast"), provider("faster")])


@pytest.mark.parametrize("regions", [{"out": region("swiglu")}, {"gated": region("nothing")}])
def test_a_region_of_unknown_parts_or_with_the_slot_of_one_is_refused(regions: dict[str, Region]) -> None:
    with pytest.raises(PlanError, match="needs a slot of its own"):
        decide([], regions)
