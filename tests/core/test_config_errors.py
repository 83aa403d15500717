"""Every mistake is one line that names the setting, the value, what was expected and who gave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_core.api import ConfigError
from deepinfer_core.config import load_config


def message(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**{"environ": {}, **arguments})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_unknown_setting_suggests_the_nearest() -> None:
    text = message(sets=["kv_cache.blok_size=3"])
    assert text == "unknown setting 'kv_cache.blok_size' (from --set); did you mean 'kv_cache.block_size'?"


def test_unknown_setting_without_its_group_suggests_the_whole_path() -> None:
    assert message(overrides={"max_runing": 3}).endswith("did you mean 'scheduling.max_running'?")


def test_unknown_setting_that_resembles_nothing_lists_what_there_is() -> None:
    text = message(overrides={"zzzz": 3})
    assert text.startswith("unknown setting 'zzzz' (from argument); there are accelerator, fallback, features, ")
    assert text.endswith("speculation, structured_outputs")
    assert message(sets=["features.zzzz=3"]).endswith("'features.zzzz' (from --set); features has batch_invariant")


@pytest.mark.parametrize(("wrong", "near"), [("modell", "model"), ("schedulin", "scheduling"), ("plugin", "plugins")])
def test_unknown_group_suggests_the_nearest(tmp_path: Path, wrong: str, near: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[{wrong}]\nzzzz = "x"\n')
    assert message(file=file).endswith(f"; did you mean the group {near!r}?")


@pytest.mark.parametrize("key", ["sources", "plugins.settings", "ops", "plugins.alow", "plugins.acme.a.b", "", "."])
def test_names_that_are_no_settings(key: str) -> None:
    message(overrides={key: 1})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("kv_cache.block_size", True, "an integer, at least 1"),
        ("kv_cache.block_size", 16.0, "an integer, at least 1"),
        ("kv_cache.block_size", "16", "an integer, at least 1"),
        ("kv_cache.block_size", None, "an integer, at least 1"),
        ("kv_cache.block_size", 0, "an integer, at least 1"),
        ("kv_cache.num_blocks", 1, "an integer, at least 2, or none"),
        ("scheduling.max_running", 10**20, "an integer, at least 1 and at most 1000000"),
        ("scheduling.max_running", 0, "an integer, at least 1 and at most 1000000"),
        ("kv_cache.memory_fraction", float("nan"), "a finite number, above 0 and at most 1, or none"),
        ("kv_cache.memory_fraction", float("inf"), "a finite number, above 0 and at most 1, or none"),
        ("kv_cache.memory_fraction", True, "a finite number, above 0 and at most 1, or none"),
        ("kv_cache.memory_fraction", 0, "a finite number, above 0 and at most 1, or none"),
        ("kv_cache.prefix_cache", 1, "true or false"),
        ("kv_cache.window_retention", "most", "'minimal' or 'full'"),
        ("model.path", 3, "a string, not empty, or none"),
        ("model.path", "", "a string, not empty, or none"),
        ("model.dtype", "fp16", "'auto' or 'float32' or 'bfloat16' or 'float16'"),
        ("scheduling.async_scheduling", 1, "'auto' or true or false"),
        ("plugins.block", "acme", "a list of strings"),
        ("plugins.allow", [1], "a list of strings or none"),
        ("speculation.confidence_temperature", [1.0, float("nan")], "a list of finite numbers"),
        ("speculation.confidence_temperature", [0.0], "a list of finite numbers, each above 0, at least one"),
        ("parallel.world_size", 2, "an integer, only 1 so far, as one process runs one model"),
        ("ops.gemm.linear", "acme:fast", "a list of strings"),
        ("accelerator", None, "a string, not empty"),
    ],
)
def test_wrong_type_or_range(path: str, value: object, expected: str) -> None:
    text = message(overrides={path: value})
    assert text.startswith(f"{path} = {value!r} (from argument): expected {expected}")


@pytest.mark.parametrize("text", ["true", "", "1.5", "0x", "sixteen", "1\n2"])
def test_text_that_is_no_number_is_shown_with_its_variable(text: str) -> None:
    said = message(environ={"DEEPINFER_KV_CACHE__BLOCK_SIZE": text.replace("\n", " ")})
    assert "(from environment DEEPINFER_KV_CACHE__BLOCK_SIZE): expected an integer, at least 1" in said


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "true", "2"])
def test_text_that_is_no_fraction(text: str) -> None:
    assert message(sets=[f"kv_cache.memory_fraction={text}"]).startswith(
        f"kv_cache.memory_fraction = {text} (from --set)"
    )


def test_group_given_as_a_value_lists_its_fields() -> None:
    text = message(overrides={"model": "demo"})
    assert text == (
        "model = 'demo' (from argument): model is a group; set one of its fields: "
        "path, dtype, max_model_len, tokenizer, qdq, fp8_activations"
    )


@pytest.mark.parametrize("item", ["kv_cache.block_size", "", "=3", " = "])
def test_set_without_key_or_value(item: str) -> None:
    assert "expected key=value" in message(sets=[item])


def test_file_that_is_missing(tmp_path: Path) -> None:
    text = message(file=tmp_path / "no.toml")
    assert "no.toml" in text
    assert "No such file" in text


def test_file_that_is_not_toml_says_the_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[kv_cache]\nblock_size = = 3\n")
    assert "line 2" in message(file=file)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in message(file=file)


def test_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deepinfer.toml"
    file.write_text("[kv_cache]\nblock_size = 1979-05-27\n")
    assert f"(from file {file})" in message(file=file)


def test_long_values_are_cut() -> None:
    assert len(message(overrides={"logging.level": "x" * 5000})) < 250
