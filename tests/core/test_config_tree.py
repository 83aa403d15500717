"""The tree itself: groups, defaults, checks, and the page that is generated from it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from deepinfer_core.api import ConfigError
from deepinfer_core.config import (
    EngineConfig,
    KVCacheConfig,
    ParallelConfig,
    SpeculationConfig,
    all_settings,
    load_config,
    shown_values,
)
from deepinfer_core.config.accept import accept
from deepinfer_core.config.document import document

GROUPS = [
    "model", "accelerator", "kv_cache", "scheduling", "ops", "fallback", "speculation", "structured_outputs",
    "features", "parallel", "plugins", "logging",
]  # fmt: skip
"""What the manual promises, in its order."""


def test_groups_are_the_promised_ones() -> None:
    names = [field.name for field in attrs.fields(EngineConfig) if not field.metadata.get("internal")]
    assert names == GROUPS


def test_every_setting_has_help_that_is_a_sentence() -> None:
    unhelpful = [path for path, setting in all_settings().items() if not setting.help.endswith(".")]
    assert unhelpful == []


def test_defaults_are_of_their_own_type_and_pass_their_own_check() -> None:
    for setting in all_settings().values():
        assert accept(setting.default, setting.annotation) == setting.default, setting.path


def test_environment_names_are_unique() -> None:
    names = [name for setting in all_settings().values() for name in setting.env]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: KVCacheConfig(block_size=0), "block_size = 0: expected at least 1"),
        (lambda: KVCacheConfig(memory_fraction=1.5), "memory_fraction = 1.5: expected above 0 and at most 1"),
        (lambda: SpeculationConfig(confidence_temperature=()), r"confidence_temperature = \(\): expected each above 0"),
        (lambda: ParallelConfig(world_size=2), "world_size = 2: expected only 1 so far"),
    ],
)
def test_objects_built_by_hand_are_checked_too(build: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()  # type: ignore[operator]


def test_configurations_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().kv_cache.block_size = 1  # type: ignore[misc]


def test_checked_in_manual_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == document() + "\n", (
        "run: python -m deepinfer_core.config.document > docs/configuration.md"
    )


def test_manual_names_every_setting() -> None:
    page = document()
    missing = [path for path in all_settings() if f"`{path}" not in page]
    assert missing == []


def test_display_shows_every_setting_once_with_its_source() -> None:
    config = load_config(
        environ={"DEEPINFER_ACME__SPEED": "3"}, sets=["ops.gemm.linear=acme:fast"], overrides={"accelerator": "cpu"}
    )
    rows = {row.path: row for row in shown_values(config)}
    assert set(all_settings()) - {"ops"} <= set(rows)
    assert len(rows) == len(shown_values(config))
    assert (rows["accelerator"].value, rows["accelerator"].source) == ("cpu", "argument")
    assert (rows["ops.gemm.linear"].value, rows["ops.gemm.linear"].source) == (["acme:fast"], "--set")
    assert rows["plugins.acme.speed"].source == "environment DEEPINFER_ACME__SPEED"
    assert rows["kv_cache.block_size"].source == "default"
