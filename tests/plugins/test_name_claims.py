"""Names that users write, and two plugins that claim the same one."""

from __future__ import annotations

from typing import get_args

import pytest
from throwaway import Site, good

from deepinfer_core.api import PluginError
from deepinfer_core.plugins import Kind, claimed, resolve

CLAIMS: dict[Kind, tuple[str, str]] = {
    "policy": ("deepinfer_scheduling", "PolicyInfo(name='x', help=h, factory=LazyRef('a:b'))"),
    "architecture": ("deepinfer_models", "ModelInfo(architectures=('w', 'x'), definition=LazyRef('a:b'))"),
    "stage": (
        "deepinfer_sampling_stages",
        "StageInfo(name='x', after='bias', arguments={'y': StageArgument(off=0, low=0, high=1)})",
    ),
    "constraint": ("deepinfer_constraints", "ConstraintInfo(name='x', help=h, factory=LazyRef('a:b'))"),
    "drafter": ("deepinfer_speculation", "DrafterInfo(name='x', help=h, factory=LazyRef('a:b'))"),
    "sink": ("deepinfer_metrics", "MetricsSinkInfo(name='x', help=h, factory=LazyRef('a:b'))"),
    "command": ("deepinfer_commands", "CommandInfo(name='x', help=h, command=LazyRef('a:b'))"),
}
LINES: dict[Kind, str] = {
    "policy": 'scheduling.policy = "acme:x" or scheduling.policy = "bolt:x"',
    "architecture": "--no-plugin acme or --no-plugin bolt",
    "stage": "--no-plugin acme or --no-plugin bolt",
    "constraint": 'structured_outputs.backend = "acme:x" or structured_outputs.backend = "bolt:x"',
    "drafter": 'speculation.method = "acme:x" or speculation.method = "bolt:x"',
    "sink": 'logging.metrics = ["acme:x"] or logging.metrics = ["bolt:x"]',
    "command": "--no-plugin acme or --no-plugin bolt",
}


def install(site: Site, kind: Kind, *plugins: str) -> None:
    hook, record = CLAIMS[kind]
    for name in plugins:
        site.install(name, good(name, f"h = {name!r}\n@hookimpl\ndef {hook}():\n    return [{record}]\n"))


def test_every_kind_is_tested() -> None:
    assert set(CLAIMS) == set(get_args(Kind))


@pytest.mark.parametrize("kind", sorted(CLAIMS))
def test_a_name_with_one_claimant_resolves(site: Site, kind: Kind) -> None:
    install(site, kind, "acme")
    plugin, item = resolve(site.load(), kind, "x")
    assert plugin == "acme"
    assert type(item).__name__ == CLAIMS[kind][1].partition("(")[0]


@pytest.mark.parametrize("kind", sorted(CLAIMS))
def test_two_claimants_are_an_error_that_names_both_and_the_way_out(site: Site, kind: Kind) -> None:
    install(site, kind, "acme", "bolt")
    with pytest.raises(PluginError) as caught:
        resolve(site.load(), kind, "x")
    assert str(caught.value) == f"{kind} 'x' is claimed by acme and bolt; write one of: {LINES[kind]}"


@pytest.mark.parametrize("kind", sorted(CLAIMS))
def test_a_pin_picks_one_of_two_claimants(site: Site, kind: Kind) -> None:
    install(site, kind, "acme", "bolt")
    assert resolve(site.load(), kind, "bolt:x")[0] == "bolt"


@pytest.mark.parametrize("wanted", ["y", "acme:y", "bolt:x"])
def test_an_unclaimed_name_is_an_error_that_lists_those_there_are(site: Site, wanted: str) -> None:
    install(site, "policy", "acme")
    with pytest.raises(
        PluginError, match=rf"^scheduling.policy = '{wanted}': no loaded plugin has policy '{wanted}'.*(?i:known: x)"
    ):
        resolve(site.load(), "policy", wanted)


def test_every_claim_is_listed_with_its_claimants(site: Site) -> None:
    install(site, "architecture", "acme", "bolt")
    listed = claimed(site.load(), "architecture")
    assert {name: [plugin for plugin, _ in holders] for name, holders in listed.items()} == {
        "w": ["acme", "bolt"],
        "x": ["acme", "bolt"],
    }
