"""Cache layouts: the best one that every operator of the group can follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deepinfer_core.api import (
    CacheEntry,
    CacheGroupSpec,
    Choice,
    KVLayoutRequest,
    OpRequest,
    PagedAttentionRequest,
    PlanError,
    Provider,
    RmsNormRequest,
    Supports,
    no,
    yes,
)
from deepinfer_core.engine.layout_choice import Located, Providers, choose_with_layouts, group_slot
from deepinfer_core.plugins import choose

PLAIN, FAST = "kv_layout:plain", "kv_layout:fast"


def provider(name: str, op: str, score: int, *caps: str, refuses_sinks: bool = False) -> tuple[str, Provider]:
    def supports(request: Any) -> Supports:
        return no("has no sinks") if refuses_sinks and request.sinks else yes(score)

    return "acme", Provider(name=name, op=op, build=lambda request, context: None, caps=set(caps), supports=supports)


PROVIDERS = [
    provider("plain", "kv_layout.paged", 10),
    provider("fast", "kv_layout.paged", 20),
    provider("plain_attention", "attention.paged", 10, PLAIN, "batch_invariant"),
    provider("fast_attention", "attention.paged", 10, FAST, refuses_sinks=True),
    provider("norm", "pointwise.rms_norm", 10),
]


def group(name: str) -> CacheGroupSpec:
    return CacheGroupSpec(name=name, layers=1, entries=(CacheEntry("key", (1, 8), "float32"),))


def attention(name: str, **changes: Any) -> PagedAttentionRequest:
    fields: dict[str, Any] = {
        "cache_group": name,
        "q_heads": 1,
        "kv_heads": 1,
        "head_dim": 8,
        "dtype": "float32",
        "cache_dtype": "float32",
        "scale": 1.0,
        "block_size": 16,
    }
    return PagedAttentionRequest(**(fields | changes))


def plan(
    requests: Mapping[str, OpRequest],
    *names: str,
    providers: Providers = PROVIDERS,
    user: Mapping[str, list[str]] | None = None,
) -> dict[str, Choice]:
    groups = [group(name) for name in names]
    layouts = {group_slot(g): KVLayoutRequest(group=g, block_size=16) for g in groups}

    def decide(requests: Mapping[str, OpRequest], providers: Providers) -> tuple[Choice, ...]:
        return choose(requests, providers, user=user or {}, fallback="error", backend_plugin="acme")

    def complete(located: Located) -> tuple[Choice, ...]:
        return decide({slot: located(request) for slot, request in requests.items()}, providers)

    decided, rest = choose_with_layouts(layouts, requests, providers, decide, complete)
    found = decided + rest
    assert [choice.slot for choice in found] == [*layouts, *requests]
    return {choice.slot: choice for choice in found}


def test_the_best_layout_decides_who_reads_it() -> None:
    found = plan({"norm": RmsNormRequest(hidden=8, eps=0.1, dtype="float32"), "attention": attention("full")}, "full")
    assert found["kv_layout_full"].provider == "acme:fast"
    assert found["attention"].provider == "acme:fast_attention"


@pytest.mark.parametrize("changes", [{"sinks": True}, {"demands": {"batch_invariant"}}])
def test_a_layout_that_an_operator_cannot_follow_gives_way(changes: dict[str, Any]) -> None:
    found = plan({"attention": attention("full", **changes)}, "full")
    assert found["kv_layout_full"].provider == "acme:plain"
    assert found["attention"].provider == "acme:plain_attention"
    (loser,) = found["kv_layout_full"].losers
    assert loser.provider == "acme:fast"
    assert "slot 'attention' could not be served in it" in loser.reason


def test_each_group_has_its_own() -> None:
    found = plan({"one": attention("one", sinks=True), "two": attention("two")}, "one", "two")
    assert [found[f"kv_layout_{name}"].provider for name in ("one", "two")] == ["acme:plain", "acme:fast"]


def test_the_users_operator_chooses_the_layout() -> None:
    found = plan({"attention": attention("full")}, "full", user={"attention.paged": ["acme:plain_attention"]})
    assert found["kv_layout_full"].provider == "acme:plain"


def test_a_layout_that_the_user_named_never_gives_way() -> None:
    with pytest.raises(PlanError, match="fast_attention: has no sinks"):
        plan({"attention": attention("full", sinks=True)}, "full", user={"kv_layout.paged": ["acme:fast"]})


def test_what_no_layout_can_serve_is_an_error_about_the_operator() -> None:
    with pytest.raises(PlanError, match=r"slot 'attention'.*lacks: unheard_of"):
        plan({"attention": attention("full", demands={"unheard_of"})}, "full")


def test_an_error_elsewhere_stays_that_error() -> None:
    requests = {"attention": attention("full"), "norm": RmsNormRequest(hidden=8, eps=0.1, dtype="x", demands={"y"})}
    with pytest.raises(PlanError, match="slot 'norm'"):
        plan(requests, "full")
