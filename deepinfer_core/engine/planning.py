"""From configuration and checkpoint to a plan: which plugins, which device, which provider for every operator.

Nothing here reads weights. The result is enough to explain every choice, and all that a worker needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

import deepinfer_core
from deepinfer_core.api import (
    API_VERSION,
    PARTS,
    BuildContext,
    CheckpointError,
    Choice,
    ConfigError,
    ConstraintInfo,
    Device,
    EnginePlan,
    ExpertShare,
    FallbackPolicy,
    ModelDefinition,
    ModelOptions,
    ModelSpec,
    OpRequest,
    PlanError,
    Policy,
    ProcessGroup,
    Provider,
    Region,
    SampleTokensRequest,
    SamplingRequest,
    StageInfo,
)
from deepinfer_core.checkpoint import Checkpoint
from deepinfer_core.config import EngineConfig, check_environment, check_plugin_tables, plugin_settings
from deepinfer_core.plugins import (
    DeviceChoice,
    Registry,
    check_user_keys,
    choose_device,
    claimed,
    guarded,
    load_plugins,
    resolve,
    unproved,
)
from deepinfer_core.plugins.nearest import suggest

from .block_size import fit_block_size
from .choosing import choose_all, model_requests
from .constraint_open import choose_compiler
from .decode_graphs import ON, graph_mode
from .loop_mode import AHEAD, drafts, loop_mode, sampling_demands, warn_unused
from .policy_open import make_policy
from .runner import runner_requests
from .sampler import sampling_region, sampling_requests, stage_order
from .speculation_module import (
    PREFIX,
    PlannedDrafter,
    PlannedModule,
    check_length,
    own_keys,
    read_needs,
    with_module,
)

CACHE_DTYPES = {"auto": "", "fp8": "float8_e4m3fn"}
"""``kv_cache.dtype`` -> ``ModelOptions.cache_dtype``."""


@attrs.define(kw_only=True)
class PlannedEngine:
    """A plan and what it was made from, ready to load weights.

    ``objections`` are warnings of plugins about the combination; errors were raised. ``constraints`` is the plugin
    and compiler of grammars; ``verifies_rows``: sampling is right when several rows belong to one request. ``experts``,
    ``group``: this process's share of the experts, and those it shares them with; None: it holds them all.
    """

    config: EngineConfig
    registry: Registry
    plan: EnginePlan
    device: Device
    definition: type[ModelDefinition]
    spec: ModelSpec
    providers: list[tuple[str, Provider]]
    policy: Policy
    drafter: PlannedDrafter | None
    constraints: tuple[str, ConstraintInfo] | None
    verifies_rows: bool
    stages: tuple[StageInfo, ...]
    objections: tuple[str, ...]
    experts: ExpertShare | None = None
    group: ProcessGroup | None = None

    @property
    def runs_ahead(self) -> bool:
        return self.plan.facts["loop"] == AHEAD

    @property
    def records_graphs(self) -> bool:
        return self.plan.facts["decode_graphs"] == ON

    def context_for(self, plugin: str) -> BuildContext:
        """What a plugin's providers build with."""
        return BuildContext(
            device=self.device.torch_device,
            max_tokens=self.config.scheduling.max_batch_tokens,
            max_requests=self.config.scheduling.max_running,
            max_model_len=self.spec.max_model_len,
            num_threads=self.device.num_threads,
            settings=_settings(self.config, self.registry, plugin),
            reference=lambda request: self._reference(request),
            group=self.group,
        )

    def _reference(self, request: OpRequest) -> Any:
        # Other demands are for whoever delegates to keep; where rows lie in the cache both must agree on.
        layouts = {demand for demand in request.demands if demand.startswith("kv_layout:")}
        for plugin, provider in self.providers:
            serves = provider.fallback and provider.op == request.op
            if serves and layouts <= provider.caps and provider.supports(request):
                build = provider.build if callable(provider.build) else provider.build.load()
                return build(request, self.context_for(plugin))
        raise PlanError(f"no reference operator for {request.op}")


def open_registry(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> Registry:
    """Load the plugins a configuration allows, and check every setting and variable that names one."""
    registry = load_plugins(
        allow=config.plugins.allow,
        block=config.plugins.block,
        requested=_plugins_named(config),
        strict=config.plugins.strict,
        files=config.plugins.paths,
    )
    settings = {name: p.info.settings for name, p in registry.plugins.items() if p.info.settings is not None}
    check_environment(environ, settings)
    check_plugin_tables(config, settings)
    for name, group in settings.items():
        plugin_settings(config, name, group)  # a bad value is an error even if nothing asks the plugin
    return registry


def make_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    environ: Mapping[str, str] = os.environ,
    *,
    experts: ExpertShare | None = None,
    group: ProcessGroup | None = None,
) -> PlannedEngine:
    """Decide everything that can be decided before weights load.

    Args:
        experts, group: this process's share of the model's experts, and the processes it shares them with.

    Raises:
        PluginError, DeviceError, PlanError, ConfigError, CheckpointError: whatever was asked for and cannot be met.
    """
    registry = open_registry(config, environ)
    chosen = pick_device(config, registry, environ)
    device = chosen.open()
    definition, spec = describe_model(config, checkpoint, registry, device, experts)
    fitted = fit_block_size(config, spec, chosen.device)
    if fitted is not config:
        config = fitted
        spec = describe_model(config, checkpoint, registry, device, experts)[1]
    providers = registry.providers(chosen.device)
    stages = _extra_stages(registry)
    drafter = _drafter(config, registry, checkpoint)
    on_host = drafter is not None and drafter.on_host
    sampling = (
        spec.vocab_size,
        chosen.device.type,
        _demands(config) | sampling_demands(config, host_drafts=on_host),
    )
    requests = {
        **spec.ops,
        **runner_requests(chosen.device.type, _demands(config), config.kv_cache.block_size),
        **sampling_requests(
            stage_order(stages), *sampling, verify=drafts(config) and config.speculation.verify != "exact"
        ),
    }
    regions = {**spec.regions, **sampling_region(*sampling)}
    if drafter is not None:
        check_length(config, spec)

        def described(source: Checkpoint, architecture: str) -> tuple[type[ModelDefinition], ModelSpec]:
            found = _definition(source, registry, architecture)
            options = attrs.evolve(_options(config, source, device), dtype=spec.dtype, max_model_len=spec.max_model_len)
            return found, found.describe(source.config, options)

        drafter = with_module(drafter, config, checkpoint, definition, spec, described)
    module = None if drafter is None else drafter.module
    _check_keys(config, chosen, spec, requests, regions, module)
    fallback = _fallback(config, chosen.device)
    choices, declined = choose_all(config, spec, requests, providers, chosen, fallback, regions)
    if drafter is not None and module is not None:
        own, parts = choose_all(own_keys(config), module.spec, dict(module.spec.ops), providers, chosen, fallback)
        drafter = attrs.evolve(drafter, module=attrs.evolve(module, choices=own))
        choices += tuple(attrs.evolve(c, slot=PREFIX + c.slot) for c in own)
        declined += tuple(attrs.evolve(c, slot=PREFIX + c.slot) for c in parts)
    policy_plugin, policy_info = resolve(registry, "policy", config.scheduling.policy)
    constraints = choose_compiler(config, registry)
    loop = loop_mode(config, spec, device, _sampling_providers(choices, providers), host_drafts=on_host)
    plan = EnginePlan(
        api=API_VERSION,
        core=deepinfer_core.__version__,
        accelerator=chosen.device.backend,
        device=_device_data(chosen),
        plugins=registry.records,
        choices=choices,
        declined=declined,
        policy=f"{policy_plugin}:{policy_info.name}",
        drafter=None if drafter is None else f"{drafter.plugin}:{drafter.info.name}",
        features=tuple(name for name, on in attrs.asdict(config.features).items() if on),
        facts={
            **({} if constraints is None else {"grammars": f"{constraints[0]}:{constraints[1].name}"}),
            **device.describe(),
            "loop": loop,
            "decode_graphs": graph_mode(
                config, device, {*spec.ops, *spec.regions}, choices, providers, with_module=module is not None
            ),
            **({} if drafter is None else drafter.facts(config)),
        },
    )
    objections = [o for _, o in registry.collect("deepinfer_check_plan", plan=plan)]
    errors = [o.text for o in objections if o.severity == "error"]
    if errors:
        raise PlanError("; ".join(errors))
    return PlannedEngine(
        config=config,
        registry=registry,
        plan=plan,
        device=device,
        definition=definition,
        spec=spec,
        providers=providers,
        policy=make_policy(policy_plugin, policy_info, _settings(config, registry, policy_plugin)),
        stages=stages,
        constraints=constraints,
        verifies_rows=all("spec_verify" in p.caps for p in _sampling_providers(choices, providers)),
        drafter=drafter,
        objections=(*(o.text for o in objections), *unproved(plan)),
        experts=experts,
        group=group,
    )


def pick_device(config: EngineConfig, registry: Registry, environ: Mapping[str, str] = os.environ) -> DeviceChoice:
    """The device of a configuration. A name from the environment may also be one of the original engine's."""
    from_environment = config.sources.get("accelerator", "").startswith("environment")
    return choose_device(registry, None if from_environment else config.accelerator, environ)


def describe_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    registry: Registry,
    device: Device,
    experts: ExpertShare | None = None,
) -> tuple[type[ModelDefinition], ModelSpec]:
    """The model class of a checkpoint, and its needs under this configuration."""
    definition = _definition(checkpoint, registry)
    options = attrs.evolve(_options(config, checkpoint, device), experts=experts)
    spec = definition.describe(checkpoint.config, options)
    if config.model.max_model_len is not None and config.model.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"model.max_model_len={config.model.max_model_len}: the checkpoint supports {spec.max_model_len} tokens"
        )
    kept = CACHE_DTYPES[config.kv_cache.dtype]
    if kept and all(entry.dtype != kept for group in spec.cache_groups for entry in group.entries):
        raise ConfigError(
            f"kv_cache.dtype={config.kv_cache.dtype!r}: {spec.architecture} keeps its state in formats of its own; "
            "set kv_cache.dtype='auto'"
        )
    return definition, spec


def _options(config: EngineConfig, checkpoint: Checkpoint, device: Device) -> ModelOptions:
    stored = {name: checkpoint.weights.describe(name).dtype for name in checkpoint.weights.names()}
    saved = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
    dtype = device.default_dtype(saved) if config.model.dtype == "auto" else config.model.dtype
    return ModelOptions(
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        block_size=config.kv_cache.block_size,
        device_type=device.info.type,
        demands=_demands(config),
        stored=stored,
        qdq=config.model.qdq,
        fp8_activations=config.model.fp8_activations,
        cache_dtype=CACHE_DTYPES[config.kv_cache.dtype],
    )


def _definition(checkpoint: Checkpoint, registry: Registry, architecture: str = "") -> type[ModelDefinition]:
    wanted = [architecture] if architecture else checkpoint.config.get("architectures") or []
    if not isinstance(wanted, list):
        raise CheckpointError(f"{checkpoint.path}: config.json: architectures={wanted!r}: expected a list of names")
    known = claimed(registry, "architecture")
    for architecture in wanted:
        if architecture in known:
            plugin, info = resolve(registry, "architecture", architecture)
            made, what = info.definition, f"architecture {architecture!r}"
            return guarded(what, plugin, made, made.load, ("describe", "build"))  # type: ignore[no-any-return]
    raise CheckpointError(
        f"{checkpoint.path}: architectures={list(wanted)!r}: no loaded plugin runs it"
        + suggest(str(wanted[0]) if wanted else "", known)
    )


def _check_keys(
    config: EngineConfig,
    chosen: DeviceChoice,
    spec: ModelSpec,
    requests: Mapping[str, OpRequest],
    regions: Mapping[str, Region],
    module: PlannedModule | None,
) -> None:
    """Refuse keys of ``ops`` that name nothing, in the target or in its draft module."""
    own = {} if module is None else model_requests(config, module.spec, chosen)
    prefixed = {PREFIX + slot: request for slot, request in own.items()}
    fused = {slot: region.request for slot, region in regions.items()}
    check_user_keys(config.ops, {**model_requests(config, spec, chosen), **requests, **fused, **prefixed})


def _sampling_providers(choices: tuple[Choice, ...], providers: list[tuple[str, Provider]]) -> list[Provider]:
    chosen = {(c.op, c.provider) for c in choices if c.op in (SamplingRequest.op, SampleTokensRequest.op)}
    return [provider for plugin, provider in providers if (provider.op, f"{plugin}:{provider.name}") in chosen]


def _extra_stages(registry: Registry) -> tuple[StageInfo, ...]:
    """Stages that plugins add; a name or argument that two of them claim is an error."""
    infos = [resolve(registry, "stage", name)[1] for name in claimed(registry, "stage")]
    return tuple({info.name: info for info in infos}.values())


def _demands(config: EngineConfig) -> frozenset[str]:
    return frozenset({"batch_invariant"} if config.features.batch_invariant else ())


def _fallback(config: EngineConfig, device: Any) -> FallbackPolicy:
    if config.fallback != "auto":
        return config.fallback
    policy: FallbackPolicy = device.fallback or "error"
    return policy


def _drafter(config: EngineConfig, registry: Registry, checkpoint: Checkpoint) -> PlannedDrafter | None:
    if not drafts(config):
        warn_unused(config)
        return None
    plugin, info = resolve(registry, "drafter", config.speculation.method or "")
    settings = _settings(config, registry, plugin)
    needs = read_needs(plugin, info, settings, config, checkpoint.config)
    return PlannedDrafter(plugin=plugin, info=info, needs=needs, settings=settings, module=None)


def _settings(config: EngineConfig, registry: Registry, plugin: str) -> Any:
    settings = registry.plugins[plugin].info.settings
    return None if settings is None else plugin_settings(config, plugin, settings)


def _plugins_named(config: EngineConfig) -> Mapping[str, str]:
    """Plugins that settings refer to by name -> the setting: these must load, or it is an error."""
    found = {
        name.partition(":")[0]: f'ops."{key}" = {name!r}'
        for key, choices in config.ops.items()
        for name in choices
        if name != PARTS
    }
    for setting, value in (
        ("accelerator", config.accelerator),
        ("scheduling.policy", config.scheduling.policy),
        ("speculation.method", config.speculation.method or ""),
        ("structured_outputs.backend", config.structured_outputs.backend),
        *(("logging.metrics", name) for name in config.logging.metrics),
    ):
        plugin, colon, _ = value.partition(":")
        if colon:
            found[plugin] = f"{setting} = {value!r}"
    return dict(sorted(found.items()))


def _device_data(chosen: Any) -> Mapping[str, Any]:
    data = attrs.asdict(chosen.device)
    data["provider"] = chosen.device.provider.target
    data["legacy_names"] = list(chosen.device.legacy_names)
    data["plugin"] = chosen.plugin
    data["losers"] = [attrs.asdict(loser) for loser in chosen.losers]
    return data
