"""Environment variables: ours, plugins', the original engine's, and nobody's."""

from __future__ import annotations

import re

import attrs
import pytest

from deepinfer_core.api import ConfigError
from deepinfer_core.config import (
    EngineConfig,
    all_settings,
    check_environment,
    check_plugin_tables,
    load_config,
    plugin_settings,
)
from deepinfer_core.config.original import COUNTERPARTS, NO_COUNTERPART

# The original engine's manual, in full, but for the names both engines share.
ORIGINAL = [
    "DEEPINFER_HF_MODEL_DIR",
    "DEEPINFER_JIT_CACHE_DIR",
    "DEEPINFER_USE_NEXTN_DECODE",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    "DEEPINFER_MAX_BACKTRACKING_TOKENS",
    "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
    "DEEPINFER_BATCH_INVARIANT",
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    "DEEPINFER_PREFILL_ATTEMPT_INTERVAL",
    "DEEPINFER_PREFILL_ANY_ATTEMPT_INTERVAL",
    "DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K",
    "DEEPINFER_INDEX_ATTN_MEMORY_LIMIT",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    "DEEPINFER_NUM_STATE_SLOTS_RATIO",
    "DEEPINFER_PREFILL_STORE_EXTRA_STATE",
    "DEEPINFER_PREFILL_STORE_EXTRA_SIZE",
    "DEEPINFER_SAMPLER_FORCE_TOPK",
    "DEEPINFER_DECODE_TOKEN_BLACKLIST",
    "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS",
    "DEEPINFER_ENFORCE_EAGER",
    "DEEPINFER_DFLASH_ENFORCE_EAGER",
    "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL",
    "DEEPINFER_DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL",
    "DEEPINFER_DECODE_PERF_CACHE_DIR",
    "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC",
    "DEEPINFER_NCCL_NUM_SMS",
    "DEEPINFER_USERBUFFER_COMM_SMS",
    "DEEPINFER_GLOO_TIMEOUT",
    "DEEPINFER_REARRANGE_P2P_GROUPS",
    "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
    "DEEPINFER_EXPERT_COUNT_WINDOW_SIZE",
    "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL",
    "DEEPINFER_REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE",
    "DEEPINFER_MOE_LB_STAT_INTERVAL",
    "DEEPINFER_SHOW_EPLB_DETAIL",
    "DEEPINFER_FORCE_LOAD_BALANCE",
    "DEEPINFER_FORCE_IMBALANCE_RATIO",
    "DEEPINFER_ENGRAM_PAD_TOKEN",
    "DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
    "DEEPINFER_XGRAMMAR_TIMEOUT",
    "DEEPINFER_XGRAMMAR_DISABLE_CACHE",
    "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES",
    "DEEPINFER_XGRAMMAR_DEBUG",
    "DEEPINFER_SO_BUILDER_CPUS",
    "DEEPINFER_LOGGING_INTERVAL_STEP",
    "DEEPINFER_NCCL_MEMORY_SAMPLE_INTERVAL_STEPS",
    "DEEPINFER_RINGBUFFER_WARNING_INTERVAL",
    "DEEPINFER_GC_INTERVAL_STEP",
    "DEEPINFER_DISABLE_SYNC_GUARD",
    "DEEPINFER_PROFILE_TORCH_CUDA_MEMORY",
    "DEEPINFER_ENABLE_MEMORY_TRACING",
    "DEEPINFER_PROFILE_HTTP_ENABLE",
    "DEEPINFER_PROFILE_HTTP_PORT_BASE",
    "DEEPINFER_TORCH_PROFILER_DIR",
    "DEEPINFER_USE_MULTIMODAL_POOL",
    "DEEPINFER_MULTIMODAL_POOL_SIZE_GB",
    "DEEPINFER_MULTI_MODAL_BUFFER_SIZE",
    "DEEPINFER_MULTI_MODAL_WORKER_TIMEOUT",
    "DEEPINFER_CPP_LOG_LEVEL",
]


def load(**environ: str) -> EngineConfig:
    return load_config(environ=environ)


@attrs.frozen
class AcmeSettings:
    speed: int = 1
    label: str = "x"
    ratio: float | None = None
    names: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.speed > 10:
            raise ValueError("speed must not exceed 10")


@pytest.mark.parametrize("name", [name for setting in all_settings().values() for name in setting.env])
def test_every_documented_variable_is_known(name: str) -> None:
    check_environment({name: "x"}, {})


def test_short_names() -> None:
    config = load(DEEPINFER_ACCELERATOR="cpu", DEEPINFER_PLUGINS="a,b", DEEPINFER_STRICT_PLUGINS="1")
    assert (config.accelerator, config.plugins.allow, config.plugins.strict) == ("cpu", ("a", "b"), True)


def test_empty_allowlist_is_not_the_same_as_none() -> None:
    assert load(DEEPINFER_PLUGINS="").plugins.allow == ()
    assert load().plugins.allow is None


def test_other_programs_variables_are_ignored() -> None:
    assert load(DEEPINFER="1", MY_DEEPINFER_FOO="1", PATH="x") == EngineConfig()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("DEEPINFER_FOO", ""),
        ("DEEPINFER_ACELERATOR", "DEEPINFER_ACCELERATOR"),
        ("DEEPINFER_BLOCK_SIZE", "DEEPINFER_KV_CACHE__BLOCK_SIZE"),
        ("DEEPINFER_KV_CACHE__BLOK_SIZE", "DEEPINFER_KV_CACHE__BLOCK_SIZE"),
        ("DEEPINFER_PLUGIN", "DEEPINFER_PLUGINS"),
        ("DEEPINFER_KV_CACHE", ""),
        ("DEEPINFER_A__B__C", ""),
        ("DEEPINFER_OPS", ""),
    ],
)
def test_unknown_variable(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={name: "1"})
    text = str(caught.value)
    assert text.startswith(f"unknown environment variable {name}")
    assert hint in text


def test_two_variables_for_one_setting_must_agree() -> None:
    environ = {"DEEPINFER_PLUGINS": "a", "DEEPINFER_PLUGINS__ALLOW": "a"}
    assert load_config(environ=environ).plugins.allow == ("a",)
    with pytest.raises(ConfigError, match=r"DEEPINFER_PLUGINS and DEEPINFER_PLUGINS__ALLOW both set plugins\.allow"):
        load_config(environ={**environ, "DEEPINFER_PLUGINS__ALLOW": "b"})


@pytest.mark.parametrize("name", ORIGINAL)
def test_every_variable_of_the_original_works_or_says_why_not(name: str) -> None:
    if name in COUNTERPARTS:
        assert load_config(environ={name: "1"}).sources[COUNTERPARTS[name].path] == f"environment {name}"
        return
    with pytest.raises(
        ConfigError, match=rf"^{name}: this variable of the original engine has no counterpart here: \w"
    ):
        load_config(environ={name: "1"})


def test_no_pattern_of_the_original_hides_a_variable_of_ours() -> None:
    ours = {name for setting in all_settings().values() for name in setting.env}
    for pattern, _ in NO_COUNTERPART:
        expression = re.compile(pattern.replace("*", ".*"))
        assert not [name for name in ours if expression.fullmatch(name)], pattern


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in NO_COUNTERPART])
def test_every_pattern_of_the_original_matches_something(pattern: str) -> None:
    assert [name for name in ORIGINAL if re.fullmatch(pattern.replace("*", ".*"), name)]


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("DEEPINFER_BATCH_INVARIANT", "1", "features.batch_invariant", True),
        ("DEEPINFER_BATCH_INVARIANT", "False", "features.batch_invariant", False),
        ("DEEPINFER_BATCH_INVARIANT", "", "features.batch_invariant", False),
        ("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0", "scheduling.async_scheduling", False),
        ("DEEPINFER_USE_NEXTN_DECODE", "3", "speculation.max_draft_tokens", 3),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "1", "speculation.schedule", "confidence"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "0", "speculation.schedule", "fixed"),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1.5", "speculation.confidence_temperature", (1.5,)),
        ("DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE", "1,2", "speculation.confidence_temperature", (1.0, 2.0)),
    ],
)
def test_meaning_of_the_original_variables(name: str, text: str, path: str, value: object) -> None:
    group, field = path.split(".")
    assert getattr(getattr(load_config(environ={name: text}), group), field) == value


def test_plugin_settings_from_file_and_environment_meet() -> None:
    config = load_config(
        environ={"DEEPINFER_MY_ACME__LABEL": "123", "DEEPINFER_MY_ACME__NAMES": "a,b"},
        sets=["plugins.my-acme.ratio=1"],
        overrides={"plugins": {"my_acme": {"speed": 4}}},
    )
    settings = plugin_settings(config, "my-acme", AcmeSettings)
    assert settings == AcmeSettings(speed=4, label="123", ratio=1.0, names=("a", "b"))


def test_plugin_without_settings_given_has_its_defaults() -> None:
    assert plugin_settings(load_config(environ={}), "acme", AcmeSettings) == AcmeSettings()


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("SPEDE", "1", "unknown setting 'plugins.acme.spede' .*; did you mean 'plugins.acme.speed'"),
        ("SPEED", "x", "plugins.acme.speed = x .*: expected an integer"),
        ("SPEED", "11", "speed must not exceed 10"),
    ],
)
def test_plugin_settings_are_checked(field: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plugin_settings(load_config(environ={f"DEEPINFER_ACME__{field}": text}), "acme", AcmeSettings)


def test_plugin_variables_are_judged_once_the_plugins_are_known() -> None:
    known = {"my-acme": AcmeSettings}
    check_environment({"DEEPINFER_MY_ACME__SPEED": "1"}, known)
    for name in ("DEEPINFER_MY_ACME__SPEDE", "DEEPINFER_MY_ACNE__SPEED"):
        with pytest.raises(ConfigError, match=rf"{name}; did you mean 'DEEPINFER_MY_ACME__SPEED'"):
            check_environment({name: "1"}, known)


def test_variable_of_a_misspelt_group_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'DEEPINFER_KV_CACHE__BLOCK_SIZE'"):
        check_environment({"DEEPINFER_KV_CASHE__BLOCK_SIZE": "1"}, {})


def test_settings_of_a_plugin_that_is_not_there() -> None:
    config = load_config(environ={}, sets=["plugins.acne.speed=1"])
    check_plugin_tables(config, ["acne"])
    with pytest.raises(ConfigError, match=r"plugins\.acne \(from --set\): no plugin .*; did you mean 'acme'"):
        check_plugin_tables(config, ["acme"])
