"""The tree of settings. Adding a setting is adding a field here; the manual and the environment names follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from .field import at_least, between, each_positive, fraction, not_empty, only, positive, setting


@attrs.frozen(kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it is computed."""

    path: str | None = setting(
        None,
        help="Checkpoint: a directory in Hugging Face form, a GGUF file, or a name: `demo`, or one that an installed "
        "package gives. Needed to run a model.",
        check=not_empty(),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", help="Compute type. `auto` takes the checkpoint's, or float32 on a host without fast 16-bit units."
    )
    max_model_len: int | None = setting(
        None,
        help="Longest context, prompt and output together. None: the checkpoint's own.",
        unit="tokens",
        check=at_least(1),
    )
    tokenizer: str | None = setting(
        None, help="Directory or `tokenizer.json` to use in place of the checkpoint's tokenizer.", check=not_empty()
    )
    qdq: Literal["auto", "on", "off"] = setting(
        "auto",
        help="Simulated quantisation of cached values and index keys. `auto`: on if and only if the checkpoint "
        "carries a quantization_config.",
    )
    fp8_activations: bool = setting(
        False,
        help="Round what enters linear layers with FP8 or FP4 weights to FP8 first, as such checkpoints were trained: "
        "faster where the device multiplies FP8. Experts are left out.",
    )


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """Memory of past tokens."""

    block_size: int = setting(
        16,
        help="Tokens of one cache block; a multiple of the model's alignment. Left alone, it becomes the smallest "
        "multiple of 16 that is one or, for a model without an alignment, what suits the device (the host: 64).",
        unit="tokens",
        check=at_least(1),
    )
    num_blocks: int | None = setting(
        None, help="Blocks in the pool. None: as many as `memory_fraction` allows.", unit="blocks", check=at_least(2)
    )
    memory_fraction: float | None = setting(
        None,
        help="Share of the device memory that is free after loading which the pool may take. "
        "None: the engine decides, less on a host than on an accelerator.",
        check=fraction(),
    )
    dtype: Literal["auto", "fp8"] = setting(
        "auto",
        help="Numbers that keys and values are kept in. `auto`: the compute type. `fp8`: e4m3 without a scale, half of "
        "the memory of 16 bits; for models whose cache is plain keys and values.",
    )
    prefix_cache: bool = setting(True, help="Reuse the blocks of earlier requests that began with the same tokens.")
    window_retention: Literal["minimal", "full"] = setting(
        "full",
        help="Which blocks of sliding-window layers stay for reuse. `full`: all, until evicted by age, those that slid "
        "out of a window first. `minimal`: those of the last window of a request, so a prefix can be continued only "
        "from where a request ended.",
    )


@attrs.frozen(kw_only=True)
class SchedulingConfig:
    """What runs in a step."""

    policy: str = setting(
        "fcfs",
        help="Scheduling policy, as `name` or `plugin:name`. `fcfs` serves in order of arrival.",
        check=not_empty(),
    )
    max_batch_tokens: int = setting(
        2048,
        help="Most query tokens of one step, prompt chunks and decode rows together.",
        unit="tokens",
        check=at_least(1),
    )
    max_running: int = setting(
        256, help="Most requests that run at once.", unit="requests", check=between(1, 1_000_000)
    )
    chunked_prefill: bool = setting(
        True, help="Split long prompts over several steps. Off: a prompt must fit in `max_batch_tokens`."
    )
    async_scheduling: Literal["auto"] | bool = setting(
        "auto", help="Launch step t+1 before the tokens of step t are known. The tokens are the same either way."
    )
    decode_graphs: Literal["auto"] | bool = setting(
        "auto",
        help="Record the forward pass of decode steps when the engine starts and launch it as one. `auto`: where "
        "device and operators can. Padded rows may change the last bits of results.",
    )


@attrs.frozen(kw_only=True)
class SpeculationConfig:
    """Drafting tokens ahead and verifying them together."""

    method: str | None = setting(
        None,
        help="Drafter, as `name` or `plugin:name`, from an installed plugin. None: no speculation.",
        check=not_empty(),
    )
    max_draft_tokens: int = setting(
        5, help="Most draft tokens of one step. 0: no speculation.", unit="tokens", check=at_least(0)
    )
    verify: Literal["auto", "exact", "rejection"] = setting(
        "auto",
        help="`exact`: a draft is accepted if it equals the target's own token, so seeds give the same output as "
        "without speculation. `rejection`: rejection sampling for requests without a seed, exact for all others. "
        "`auto`: rejection sampling for requests without a seed whose drafts come with a distribution.",
    )
    schedule: Literal["fixed", "confidence"] = setting(
        "fixed", help="How many drafts are verified: as many as there are, or what pays by the drafter's confidence."
    )
    confidence_temperature: tuple[float, ...] = setting(
        (1.0,),
        help="Temperature of the drafter's confidence: one number, or one for each draft position.",
        check=each_positive(),
    )


@attrs.frozen(kw_only=True)
class StructuredOutputsConfig:
    """Output that follows a grammar or schema."""

    backend: str = setting(
        "auto",
        help="Grammar compiler, as `name` or `plugin:name`. `auto`: the one that is installed.",
        check=not_empty(),
    )
    compile_seconds: float = setting(
        20.0,
        help="A request whose grammar is not compiled by then ends with an error.",
        unit="seconds",
        check=positive(),
    )
    compile_threads: int = setting(2, help="Threads that compile grammars.", check=at_least(1))
    cache_bytes: int = setting(
        256 << 20, help="Compiled grammars kept for the next request.", unit="bytes", check=at_least(0)
    )
    compiled_bytes: int = setting(
        64 << 20, help="A grammar that takes more memory compiled is refused.", unit="bytes", check=at_least(1)
    )
    jump_forward: int = setting(
        32,
        help="Most tokens that one step takes because the grammar allows nothing else. 0: none, each has its own step.",
        unit="tokens",
        check=at_least(0),
    )


@attrs.frozen(kw_only=True)
class FeaturesConfig:
    """Properties asked of every operator."""

    batch_invariant: bool = setting(
        False, help="Bitwise the same result for a request whatever runs beside it. Operators that cannot are refused."
    )


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """Several processes for one model."""

    world_size: int = setting(
        1, help="Processes that share one model.", unit="processes", check=only(1, "one process runs one model")
    )


@attrs.frozen(kw_only=True)
class PluginsConfig:
    """What loads. Tables named after plugins hold their settings: `plugins.<name>.<field>`.

    Attributes:
        settings: plugin name (lower case, `-` and `.` written `_`) -> field -> value, unchecked until the plugin is
            loaded (see :func:`deepinfer_core.config.plugin_settings`).
    """

    allow: tuple[str, ...] | None = setting(
        None,
        help="Load these plugins only, besides the core's own, as `name` or `name@distribution`. None: all installed.",
        env="DEEPINFER_PLUGINS",
    )
    block: tuple[str, ...] = setting((), help="Never load these plugins. `--no-plugin NAME` adds to it.")
    paths: tuple[str, ...] = setting((), help="Plugins that are not installed: a dotted module or a `.py` file each.")
    strict: bool = setting(
        False,
        help="A plugin that is installed but broken is an error, not one line of warning.",
        env="DEEPINFER_STRICT_PLUGINS",
    )
    settings: Mapping[str, Mapping[str, object]] = attrs.field(factory=dict, metadata={"open": True})


@attrs.frozen(kw_only=True)
class LoggingConfig:
    """What the engine says while it works, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("warning", help="Least severity that is written.")
    format: Literal["console", "json"] = setting("console", help="Lines for people, or one JSON object per event.")
    progress: bool = setting(True, help="Progress bars for loading and for batches of prompts, on a terminal.")
    metrics: tuple[str, ...] = setting((), help="Metrics sinks, as `name` or `plugin:name`.")
    trace_file: str | None = setting(None, help="Record arrivals and steps to this file.", check=not_empty())


@attrs.frozen(kw_only=True)
class EngineConfig:
    """All settings of an engine.

    Attributes:
        sources: dotted path of every setting -> where its value came from.
    """

    model: ModelConfig = attrs.field(factory=ModelConfig)
    accelerator: str = setting(
        "auto",
        help="Backend to run on. `auto`: the backend with the highest priority whose device is present.",
        check=not_empty(),
    )
    kv_cache: KVCacheConfig = attrs.field(factory=KVCacheConfig)
    scheduling: SchedulingConfig = attrs.field(factory=SchedulingConfig)
    ops: Mapping[str, tuple[str, ...]] = setting(
        dict,
        help="Providers for an operator, best first, as `plugin:provider`: `ops.<operator>`. "
        "What is listed here is used or it is an error.",
    )
    fallback: Literal["auto", "error", "warn", "allow"] = setting(
        "auto", help="When an operator has no provider but the reference. `auto`: what the backend says, else `error`."
    )
    speculation: SpeculationConfig = attrs.field(factory=SpeculationConfig)
    structured_outputs: StructuredOutputsConfig = attrs.field(factory=StructuredOutputsConfig)
    features: FeaturesConfig = attrs.field(factory=FeaturesConfig)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    logging: LoggingConfig = attrs.field(factory=LoggingConfig)
    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False, metadata={"internal": True})
