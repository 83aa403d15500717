"""Allowlist, blocklist, requests and pins."""

from __future__ import annotations

from typing import Any

import pytest
from throwaway import Site, good

from deepinfer_core.api import PluginError
from deepinfer_core.plugins import load_plugins


def test_without_an_allowlist_everything_installed_loads(site: Site) -> None:
    site.install("acme", good("acme"))
    site.install("bolt", good("bolt"))
    assert list(site.load().plugins) == ["acme", "bolt"]


def test_an_allowlist_keeps_strangers_out(site: Site, logs: list[Any]) -> None:
    site.install("acme", good("acme"))
    site.install("bolt", "raise RuntimeError('imported')")
    assert list(site.load(allow=["acme"]).plugins) == ["acme"]
    assert logs == []


def test_an_empty_allowlist_means_no_strangers_but_the_cores_own(site: Site) -> None:
    site.install("acme", good("acme"))
    loaded = load_plugins([], path=[str(site.root)]).plugins
    assert "acme" not in loaded
    assert "reference" in loaded


def test_a_blocked_plugin_is_not_imported(site: Site) -> None:
    site.install("acme", "raise RuntimeError('imported')")
    registry = site.load(block=["acme"])
    assert (dict(registry.plugins), registry.failures) == ({}, ())


def test_a_built_in_can_be_blocked_by_name(site: Site) -> None:
    assert "reference" not in load_plugins(None, ["reference"], path=[str(site.root)]).plugins


def test_block_wins_over_allow(site: Site) -> None:
    site.install("acme", good("acme"))
    assert dict(site.load(allow=["acme"], block=["acme"]).plugins) == {}


@pytest.mark.parametrize(
    ("arguments", "origin"),
    [
        ({"allow": ["acm"]}, "DEEPINFER_PLUGINS"),
        ({"block": ["acm"]}, "--no-plugin"),
        ({"requested": ["acm"]}, "asked"),
        ({"requested": {"acm": "ops.\"gemm.linear\" = 'acm:packed'"}}, "^ops.\"gemm.linear\" = 'acm:packed': "),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(site: Site, arguments: dict[str, Any], origin: str) -> None:
    site.install("acme", good("acme"))
    with pytest.raises(PluginError, match=rf"{origin}.*no plugin named 'acm' is installed; did you mean 'acme'"):
        site.load(**arguments)


def test_a_request_for_a_blocked_plugin_is_an_error(site: Site) -> None:
    site.install("acme", good("acme"))
    with pytest.raises(PluginError, match="'acme' is asked for and also blocked by --no-plugin"):
        site.load(block=["acme"], requested=["acme"])


def test_a_request_outside_the_allowlist_is_an_error(site: Site) -> None:
    site.install("acme", good("acme"))
    with pytest.raises(PluginError, match="not listed in DEEPINFER_PLUGINS"):
        site.load(allow=[], requested=["acme"])


@pytest.fixture
def doubled(site: Site) -> Site:
    site.install("acme", good("acme", help="one"), distribution="one-dist")
    site.install("acme", good("acme", help="two"), distribution="two-dist")
    return site


def test_the_same_name_from_two_distributions_refuses_both(doubled: Site, logs: list[Any]) -> None:
    registry = doubled.load()
    assert dict(registry.plugins) == {}
    assert [(f.distribution, f.stage) for f in registry.failures] == [
        ("one-dist", "duplicate"),
        ("two-dist", "duplicate"),
    ]
    assert "acme@two-dist" in registry.failures[1].cause
    assert len(logs) == 2


def test_asking_for_a_doubled_name_without_a_pin_is_an_error(doubled: Site) -> None:
    with pytest.raises(PluginError, match=r"one-dist and two-dist both provide.*acme@one-dist"):
        doubled.load(requested=["acme"])


@pytest.mark.parametrize("pin", ["acme@two-dist", "acme@Two_Dist"])
def test_a_pin_picks_one_of_two(doubled: Site, pin: str) -> None:
    registry = doubled.load(allow=[pin])
    assert registry.plugins["acme"].info.help == "two"
    assert registry.failures == ()


def test_blocking_one_of_two_leaves_the_other(doubled: Site) -> None:
    assert doubled.load(block=["acme@one-dist"]).plugins["acme"].info.help == "two"


def test_a_pin_to_a_distribution_that_has_no_such_plugin_names_those_that_do(doubled: Site) -> None:
    with pytest.raises(PluginError, match="'acme' comes from one-dist, two-dist"):
        doubled.load(allow=["acme@three-dist"])


def test_two_pins_of_one_name_contradict(doubled: Site) -> None:
    with pytest.raises(PluginError, match="pinned both to one-dist and to two-dist"):
        doubled.load(allow=["acme@one-dist"], requested=["acme@two-dist"])


def test_a_request_pinned_to_a_blocked_distribution_is_an_error(doubled: Site) -> None:
    with pytest.raises(PluginError, match="blocked or pinned away"):
        doubled.load(block=["acme@one-dist"], requested=["acme@one-dist"])


def test_a_stranger_cannot_take_the_name_of_a_built_in(site: Site) -> None:
    site.install("reference", good("reference", help="stranger"))
    registry = load_plugins(path=[str(site.root)])
    assert registry.plugins["reference"].info.help != "stranger"
    assert ("reference-dist", "duplicate") in [(f.distribution, f.stage) for f in registry.failures]


def test_a_pin_lets_a_stranger_replace_a_built_in(site: Site) -> None:
    site.install("reference", good("reference", help="stranger"))
    registry = load_plugins(requested=["reference@reference-dist"], path=[str(site.root)])
    assert registry.plugins["reference"].info.help == "stranger"
