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
    tile: int = 64
    mode: str = "fast"

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
    settings = resolve(site, {"DEEPINFER_ACME__MODE": "exact"}, tile=32)
    assert (settings.tile, settings.mode) == (32, "exact")


def test_an_unknown_setting_is_an_error_with_the_nearest_name(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"(?s)plugins\.acme\.tille.*tile"):
        resolve(site, tille=32)


def test_a_setting_of_the_wrong_type_names_field_value_and_type(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"(?s)plugins\.acme\.tile.*'wide'.*integer"):
        resolve(site, tile="wide")
