"""Providers that are chosen only where the user's list names them in full."""

from __future__ import annotations

import attrs
import pytest

from deepinfer_core.api import LazyRef, LinearRequest, PlanError, Provider, yes
from deepinfer_core.plugins import choose

REQUEST = LinearRequest(in_features=8, out_features=4, dtype="float32", out_dtype="float32", weight_dtype="float32")


def provider(name: str, score: int) -> Provider:
    return Provider(name=name, op="gemm.linear", build=LazyRef("x:y"), supports=lambda _: yes(score))


EXACT = ("acme", provider("exact", 10))
ROUGH = ("acme", attrs.evolve(provider("rough", 90), on_request=True))
REFERENCE = ("reference", attrs.evolve(provider("linear", 0), fallback=True))


def pick(providers: list[tuple[str, Provider]], user: dict[str, list[str]] | None = None) -> tuple[str, dict[str, str]]:
    (choice,) = choose({"wo": REQUEST}, providers, user=user or {}, fallback="allow", backend_plugin="acme")
    return choice.provider, {loser.provider: loser.reason for loser in choice.losers}


def test_its_score_counts_for_nothing() -> None:
    chosen, losers = pick([EXACT, ROUGH])
    assert chosen == "acme:exact"
    assert losers == {"acme:rough": 'only on request: ops."gemm.linear" = ["acme:rough"]'}


def test_the_plugins_name_alone_does_not_ask_for_it() -> None:
    assert pick([EXACT, ROUGH], {"gemm.linear": ["acme"]})[0] == "acme:exact"


def test_its_full_name_does() -> None:
    assert pick([EXACT, ROUGH], {"gemm.linear": ["acme:rough", "acme"]})[0] == "acme:rough"


def test_it_never_stands_in() -> None:
    assert pick([ROUGH, REFERENCE])[0] == "reference:linear"
    with pytest.raises(PlanError, match="acme:rough: only when named in full"):
        pick([ROUGH])
