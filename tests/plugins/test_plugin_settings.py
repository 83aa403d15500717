"""A plugin's typed settings, from its declaration to the values it gets."""

from __future__ import annotations

from typing import Any

import pytest
from throwaway import PRELUDE, Site

from deepinfer_core.api import ConfigError
from deepinfer_core.config import load_config, plugin_settings

SOURCE = f"""{PRELUDE}
import attrs

@attrs.frozen
class Settings:
    tile: int = attrs.field(default=64, validator=attrs.validators.ge(1))
    mode: str = attrs.field(default="fast", validator=attrs.validators.in_(("fast", "exact (slow)")))

    def __attrs_post_init__(self):
        if self.tile > 64 and self.mode == "fast":
            raise ValueError("fast needs a tile of at most 64")

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="acme", settings=Settings)
"""


def resolve(site: Site, environ: dict[str, str] | None = None, **settings: Any) -> Any:
    site.install("acme", SOURCE)
    info = site.load().plugins["acme"].info
    assert info.settings is not None
    config = load_config(overrides={"plugins": {"acme": settings}} if settings else {}, environ=environ or {})
    return plugin_settings(config, "acme", info.settings)


def test_defaults_are_the_plugins_own(site: Site) -> None:
    settings = resolve(site)
    assert (settings.tile, settings.mode) == (64, "fast")


def test_a_given_value_and_a_variable_reach_the_plugin(site: Site) -> None:
    settings = resolve(site, {"DEEPINFER_ACME__MODE": "exact (slow)"}, tile=32)
    assert (settings.tile, settings.mode) == (32, "exact (slow)")


def test_an_unknown_setting_is_an_error_with_the_nearest_name(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"(?s)plugins\.acme\.tille.*tile"):
        resolve(site, tille=32)


def test_a_setting_of_the_wrong_type_names_field_value_and_type(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"(?s)plugins\.acme\.tile.*'wide'.*integer"):
        resolve(site, tile="wide")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tile": 0}, "plugins.acme.tile = 0 (from argument): must be >= 1"),
        ({"mode": "odd"}, "plugins.acme.mode = 'odd' (from argument): must be in ('fast', 'exact (slow)')"),
        ({"tile": 65}, "plugins.acme = {'tile': 65} (from argument): fast needs a tile of at most 64"),
    ],
)
def test_what_the_plugins_own_class_refuses_names_field_value_and_source(
    site: Site, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(site, **settings)
    assert str(caught.value) == said


def test_a_variable_that_the_class_refuses_is_the_source(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"tile = 0 \(from environment DEEPINFER_ACME__TILE\): must be >= 1"):
        resolve(site, {"DEEPINFER_ACME__TILE": "0"})
