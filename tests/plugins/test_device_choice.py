"""Which backend runs: the user's word is kept or refused, never replaced."""

from __future__ import annotations

import attrs
import pytest
from throwaway import Site, good

from deepinfer_core.api import DeviceError, PlanError, PluginError
from deepinfer_core.plugins import DeviceChoice, choose_device


@attrs.frozen
class Backend:
    """Source of a plugin's probe: its devices as ``(backend, priority, legacy names)``."""

    devices: tuple[tuple[str, int, tuple[str, ...]], ...]

    def source(self, name: str) -> str:
        rows = ", ".join(
            f"DeviceInfo(backend={b!r}, type='t', arch='a', count=1, memory=1, priority={p}, evidence='seen {b}', "
            f"provider=LazyRef('x:y'), legacy_names={names!r})"
            for b, p, names in self.devices
        )
        return good(name, f"@hookimpl\ndef deepinfer_probe(env):\n    return [{rows}]\n")


def install(site: Site, name: str, *devices: tuple[str, int, tuple[str, ...]]) -> None:
    site.install(name, Backend(devices).source(name))


@pytest.fixture
def machine(site: Site) -> Site:
    install(site, "host", ("host", 0, ()))
    install(site, "acme", ("acme", 100, ("oldname",)))
    install(site, "bolt", ("bolt", 50, ()))
    return site


def choose(site: Site, accelerator: str | None = None, **environ: str) -> DeviceChoice:
    return choose_device(site.load(), accelerator, environ)


@pytest.mark.parametrize("nothing", [None, "auto", ""])
def test_the_highest_priority_wins_when_nobody_asks(machine: Site, nothing: str | None) -> None:
    device, plugin, losers = choose(machine, nothing)
    assert (device.backend, plugin) == ("acme", "acme")
    assert [(loser.provider, loser.score) for loser in losers] == [("bolt:bolt", 50), ("host:host", 0)]
    assert "priority 50, chosen has 100; seen bolt" in losers[0].reason


def test_the_argument_outranks_the_variable_and_priority(machine: Site) -> None:
    assert choose(machine, "host", DEEPINFER_ACCELERATOR="bolt").device.backend == "host"


def test_the_variable_outranks_priority(machine: Site) -> None:
    assert choose(machine, None, DEEPINFER_ACCELERATOR="bolt").device.backend == "bolt"


@pytest.mark.parametrize("nothing", ["auto", ""])
def test_a_variable_that_says_nothing_leaves_it_to_priority(machine: Site, nothing: str) -> None:
    assert choose(machine, None, DEEPINFER_ACCELERATOR=nothing).device.backend == "acme"


def test_a_name_of_the_original_engine_means_the_backend_that_declares_it(machine: Site) -> None:
    assert choose(machine, None, DEEPINFER_ACCELERATOR="oldname").device.backend == "acme"


def test_original_names_are_for_the_variable_only(machine: Site) -> None:
    with pytest.raises(DeviceError, match="accelerator='oldname': no such device"):
        choose(machine, "oldname")


def test_a_backends_own_name_wins_over_an_original_name(machine: Site) -> None:
    install(machine, "odd", ("odd", 500, ("bolt",)))
    assert choose(machine, None, DEEPINFER_ACCELERATOR="bolt").plugin == "bolt"


def test_an_original_name_that_nobody_declares_names_what_is_there(machine: Site) -> None:
    with pytest.raises(DeviceError, match=r"DEEPINFER_ACCELERATOR='vendor': no such device.*known: acme, bolt, host"):
        choose(machine, None, DEEPINFER_ACCELERATOR="vendor")


def test_an_unknown_backend_is_an_error_with_the_nearest_name(machine: Site) -> None:
    with pytest.raises(DeviceError, match="did you mean 'acme'"):
        choose(machine, "acmee")


def test_equal_priorities_are_an_error_that_prints_the_line_to_write(machine: Site) -> None:
    install(machine, "twin", ("twin", 100, ()))
    with pytest.raises(PlanError, match='accelerator = "acme" or accelerator = "twin"'):
        choose(machine)


def test_equal_priorities_do_not_matter_below_the_top(machine: Site) -> None:
    install(machine, "twin", ("twin", 50, ()))
    assert choose(machine).device.backend == "acme"


def test_one_backend_from_two_plugins_needs_a_pin(machine: Site) -> None:
    install(machine, "fork", ("acme", 100, ()))
    with pytest.raises(PlanError, match='accelerator = "acme:acme" or accelerator = "fork:acme"'):
        choose(machine, "acme")
    assert choose(machine, "fork:acme").plugin == "fork"


def test_of_two_devices_of_one_backend_the_better_is_taken(site: Site) -> None:
    install(site, "acme", ("acme", 100, ("small",)), ("acme", 200, ("big",)))
    assert choose(site, "acme").device.legacy_names == ("big",)


BROKEN_PROBE = "@hookimpl\ndef deepinfer_probe(env):\n    raise OSError('driver 1.1 is too old')\n"


def test_a_raising_probe_that_nobody_asked_for_is_recorded_and_shown(machine: Site) -> None:
    machine.install("sick", good("sick", BROKEN_PROBE))
    registry = machine.load()
    choice = choose_device(registry, None, {})
    assert choice.device.backend == "acme"
    assert [failure.name for failure in registry.failures] == ["sick"]
    assert "driver 1.1 is too old" in {loser.provider: loser.reason for loser in choice.losers}["sick"]


@pytest.mark.parametrize("arguments", [("sick", {}), (None, {"DEEPINFER_ACCELERATOR": "sick"})])
def test_asking_for_a_backend_whose_probe_raises_never_runs_on_another(
    machine: Site, arguments: tuple[str | None, dict[str, str]]
) -> None:
    machine.install("sick", good("sick", BROKEN_PROBE))
    with pytest.raises(PluginError, match=r"'sick'.*driver 1.1 is too old"):
        choose(machine, arguments[0], **arguments[1])


def test_asking_for_a_backend_whose_plugin_does_not_import_never_runs_on_another(machine: Site) -> None:
    machine.install("sick", "raise ImportError('no libsick.so')")
    with pytest.raises(PluginError, match=r"accelerator='sick'.*no libsick\.so"):
        choose(machine, "sick")


def test_a_broken_plugin_is_named_when_its_backend_has_another_name(machine: Site) -> None:
    machine.install("sick", "raise ImportError('no libsick.so')")
    with pytest.raises(DeviceError, match=r"accelerator='sick-v2'.*no libsick\.so"):
        choose(machine, "sick-v2")


def test_a_probe_that_found_nothing_is_shown_as_such(machine: Site) -> None:
    install(machine, "absent")
    assert {loser.provider: loser.reason for loser in choose(machine).losers}["absent"] == "found no device"
    with pytest.raises(DeviceError, match="found no device: absent"):
        choose(machine, "absent")


def test_no_device_at_all_is_an_error(site: Site) -> None:
    install(site, "absent")
    site.install("sick", good("sick", BROKEN_PROBE))
    with pytest.raises(
        DeviceError, match=r"no plugin found a device; found no device: absent, sick; .*too old.*plugins.block"
    ):
        choose(site)


def test_probes_see_the_environment_and_root_they_are_given(site: Site) -> None:
    body = """
        @hookimpl
        def deepinfer_probe(env):
            return [DeviceInfo(backend="a", type="t", arch="a", count=1, memory=1, priority=1,
                               evidence=env.root + env.environ["SEEN"], provider=LazyRef("x:y"))]
    """
    site.install("acme", good("acme", body))
    assert choose_device(site.load(), None, {"SEEN": "yes"}, root="/r/").device.evidence == "/r/yes"


ABSENT = """
@hookimpl
def deepinfer_probe(env):
    from deepinfer_core.api import NoDevice
    return [NoDevice(backend="cart", reason="no /dev/cart0", fix="check: ls /dev/cart*", legacy_names=("oldcart",))]
"""


@pytest.mark.parametrize(
    ("accelerator", "environ"), [("cart", {}), (None, {"DEEPINFER_ACCELERATOR": "cart"}), ("wagon:cart", {})]
)
def test_who_asks_for_an_absent_device_reads_why_and_what_to_do(
    machine: Site, accelerator: str | None, environ: dict[str, str]
) -> None:
    machine.install("wagon", good("wagon", ABSENT))
    with pytest.raises(DeviceError, match=r"='(wagon:)?cart': no /dev/cart0; check: ls /dev/cart\*$"):
        choose(machine, accelerator, **environ)


def test_an_original_name_of_an_absent_device_says_why_too(machine: Site) -> None:
    machine.install("wagon", good("wagon", ABSENT))
    with pytest.raises(DeviceError, match="DEEPINFER_ACCELERATOR='oldcart': no /dev/cart0"):
        choose(machine, None, DEEPINFER_ACCELERATOR="oldcart")


def test_an_absent_device_is_a_loser_with_its_reason_and_never_chosen(machine: Site) -> None:
    machine.install("wagon", good("wagon", ABSENT))
    device, _, losers = choose(machine, None)
    assert device.backend == "acme"
    assert [loser.reason for loser in losers if loser.provider == "wagon:cart"] == [
        "no /dev/cart0; check: ls /dev/cart*"
    ]
