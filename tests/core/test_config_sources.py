"""Where values come from, which source wins, and how text becomes a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import ConfigError
from deepinfer_core.config import EngineConfig, KVCacheConfig, load_config, override


def load(**arguments: Any) -> EngineConfig:
    return load_config(**{"environ": {}, **arguments})


def test_nothing_given_gives_the_defaults() -> None:
    config = load()
    assert config == EngineConfig()
    assert set(config.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("present", "winner", "source"),
    [
        ("argument set environment file", 5, "argument"),
        ("set environment file", 4, "--set"),
        ("environment file", 3, "environment DEEPINFER_KV_CACHE__BLOCK_SIZE"),
        ("file", 2, "file "),
    ],
)
def test_precedence(tmp_path: Path, present: str, winner: int, source: str) -> None:
    file = tmp_path / "deepinfer.toml"
    file.write_text("[kv_cache]\nblock_size = 2\n")
    names = present.split()
    config = load(
        file=file if "file" in names else None,
        environ={"DEEPINFER_KV_CACHE__BLOCK_SIZE": "3"} if "environment" in names else {},
        sets=["kv_cache.block_size=4"] if "set" in names else [],
        overrides={"kv_cache": {"block_size": 5}} if "argument" in names else None,
    )
    assert config.kv_cache.block_size == winner
    assert config.sources["kv_cache.block_size"].startswith(source)


def test_sources_mix_within_a_group(tmp_path: Path) -> None:
    file = tmp_path / "deepinfer.toml"
    file.write_text("[scheduling]\nmax_running = 8\nmax_batch_tokens = 64\n")
    config = load(file=file, sets=["scheduling.max_running=9"])
    assert (config.scheduling.max_running, config.scheduling.max_batch_tokens) == (9, 64)


def test_variable_names_the_file_and_an_argument_outranks_it(tmp_path: Path) -> None:
    for name, size in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.toml").write_text(f"kv_cache.block_size = {size}\n")
    environ = {"DEEPINFER_CONFIG": str(tmp_path / "a.toml")}
    assert load(environ=environ).kv_cache.block_size == 2
    assert load(environ=environ, file=tmp_path / "b.toml").kv_cache.block_size == 3


def test_arguments_may_be_dotted_paths() -> None:
    assert load(overrides={"kv_cache.block_size": 8}).kv_cache.block_size == 8


def test_of_two_sets_the_later_wins() -> None:
    assert load(sets=["accelerator=a", "accelerator=b"]).accelerator == "b"


@pytest.mark.parametrize(
    ("item", "path", "expected"),
    [
        ("kv_cache.block_size=32", "kv_cache.block_size", 32),
        ("kv_cache.num_blocks=none", "kv_cache.num_blocks", None),
        ("kv_cache.memory_fraction=1", "kv_cache.memory_fraction", 1.0),
        ("kv_cache.prefix_cache=off", "kv_cache.prefix_cache", False),
        ("scheduling.async_scheduling=auto", "scheduling.async_scheduling", "auto"),
        ("scheduling.async_scheduling=false", "scheduling.async_scheduling", False),
        ("model.path=123", "model.path", "123"),
        ("model.path='a b'", "model.path", "a b"),
        ("model.path=a=b", "model.path", "a=b"),
        ("model.dtype=float16", "model.dtype", "float16"),
        ("plugins.allow=a, b", "plugins.allow", ("a", "b")),
        ("plugins.allow=", "plugins.allow", ()),
        ('plugins.allow=["x,y"]', "plugins.allow", ("x,y",)),
        ("speculation.confidence_temperature=1.0,0.5", "speculation.confidence_temperature", (1.0, 0.5)),
    ],
)
def test_text_is_read_as_the_setting_wants_it(item: str, path: str, expected: object) -> None:
    group, name = path.split(".")
    value = getattr(getattr(load(sets=[item]), group), name)
    assert value == expected
    assert type(value) is type(expected)


@given(st.text(max_size=30))
def test_a_string_setting_takes_any_text_or_refuses_it_cleanly(text: str) -> None:
    try:
        value = load(sets=[f"logging.trace_file={text}"]).logging.trace_file
    except ConfigError:
        assert text.strip() in ("", "''", '""', "''''''", '""""""')
    else:
        assert value is None or isinstance(value, str)


@given(st.integers(min_value=1, max_value=2**40))
def test_numbers_survive_the_way_through_text(number: int) -> None:
    assert load(sets=[f"kv_cache.block_size={number}"]).kv_cache.block_size == number


def test_operator_lists_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "deepinfer.toml"
    file.write_text('[ops]\n"gemm.linear" = ["a:x"]\nattention.paged = ["a:y"]\nsampling.draw = ["a:z"]\n')
    config = load(
        file=file,
        environ={"DEEPINFER_OPS__ATTENTION__WRITE_KV": "b:p,b:q"},
        sets=["ops.sampling.draw=c:r"],
        overrides={"ops": {"pointwise.rope": ["d:s"]}},
    )
    assert config.ops == {
        "gemm.linear": ("a:x",),
        "attention.paged": ("a:y",),
        "attention.write_kv": ("b:p", "b:q"),
        "sampling.draw": ("c:r",),
        "pointwise.rope": ("d:s",),
    }


def test_override_leaves_everything_else_and_its_sources() -> None:
    config = load(sets=["kv_cache.block_size=8", "plugins.acme.speed=2"], environ={"DEEPINFER_ACCELERATOR": "cpu"})
    changed = override(config, {"plugins.block": ["x"]}, source="--no-plugin")
    assert changed.plugins.block == ("x",)
    assert changed.sources == {**config.sources, "plugins.block": "--no-plugin"}
    assert override(changed, {"plugins.block": ()}) == config


def test_override_of_nothing_is_the_same() -> None:
    config = load(sets=["speculation.confidence_temperature=1,2"])
    assert override(config, {}) == config
    assert override(config, {}).sources == config.sources


def test_override_keeps_what_was_set_by_hand() -> None:
    config = EngineConfig(kv_cache=KVCacheConfig(block_size=64))
    changed = override(config, {"accelerator": "cpu"}, sets=["kv_cache.num_blocks=10"])
    assert (changed.kv_cache.block_size, changed.kv_cache.num_blocks, changed.accelerator) == (64, 10, "cpu")
    assert changed.sources["kv_cache.block_size"] == "config object"
