"""Puts an engine together: operators, weights, caches, loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from deepinfer_core.api import (
    CheckpointError,
    ConfigError,
    DeviceError,
    KVLayout,
    LayerCache,
    Model,
    ModelContext,
    PlanError,
    PluginError,
)
from deepinfer_core.checkpoint import Checkpoint, check_tensors
from deepinfer_core.plugins import OpTable, WrapOp, freeze
from deepinfer_core.tokenizer import Tokenizer, check_tokenizer

from .cache_memory import CacheMemory, allocate_caches
from .commit import Committer
from .constraint_open import open_constraints
from .core import EngineCore
from .decode_graphs import ON, DecodeGraphs
from .intake import Intake, Limits
from .kv_cache import KVCache
from .layout_choice import group_slot
from .open_observer import OpenSink, connect, open_sinks
from .planner import Planner
from .planning import PlannedEngine
from .runner import Runner
from .slot_table import SlotTable
from .speculation import Speculator
from .speculation_module import PREFIX, PlannedModule, build_module, reserve, shares_ends
from .speculation_start import cost_key, open_speculation


@attrs.define(kw_only=True)
class Engine:
    """A running engine: its plan, its parts, and how its memory is used (bytes)."""

    planned: PlannedEngine
    core: EngineCore
    intake: Intake
    tokenizer: Tokenizer | None
    ops: OpTable
    model: Model
    memory: Mapping[str, int]
    sinks: Mapping[str, OpenSink]

    def close(self) -> None:
        self.core.close()
        self.core.observer.close()
        self.planned.registry.notify("deepinfer_worker_stop", rank=0)


def build_engine(
    planned: PlannedEngine,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    *,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    wrap_op: WrapOp | None = None,
) -> Engine:
    """Load weights, allocate caches and start the loop of a plan.

    Args:
        progress: called with a tensor's name after it was loaded.
        wrap_op: replaces each operator as the table is made, for measurements.

    Raises:
        CheckpointError: the checkpoint does not fit the model. ConfigError: the caches do not fit the memory.
        DeviceError: something else does not.
    """
    try:
        return _build(planned, checkpoint, tokenizer, progress, clock, wrap_op)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, PlanError | PluginError) else error  # both wrap what was raised
        if cause is None or not planned.device.is_out_of_memory(cause):
            raise
        raise DeviceError(_no_room(planned, checkpoint)) from error


def _no_room(planned: PlannedEngine, checkpoint: Checkpoint) -> str:
    stored = [checkpoint.weights.describe(name).num_bytes for name in checkpoint.weights.names()]
    return (
        f"{planned.device.info.backend}: out of memory while the engine starts, for a checkpoint of "
        f"{sum(stored) / 2**20:.0f} MiB: end what else uses this device, lower kv_cache.memory_fraction, or use a "
        "smaller model"
    )


def _build(
    planned: PlannedEngine,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    progress: Callable[[str], None],
    clock: Callable[[], float],
    wrap_op: WrapOp | None,
) -> Engine:
    spec, config = planned.spec, planned.config
    check_tensors(checkpoint.weights, spec.tensors)
    if tokenizer is not None:
        check_tokenizer(tokenizer, spec.vocab_size)
    sinks = open_sinks(planned)
    planned.registry.notify("deepinfer_worker_start", plan=planned.plan, rank=0)
    ops = freeze(planned.plan.choices, planned.providers, planned.context_for, wrap_op)
    planned.registry.freeze()
    model = _load_model(planned, checkpoint, ops, progress)
    module = _load_module(planned, checkpoint, model, progress, wrap_op)
    memory = _allocate(planned, ops, module)
    planner = Planner(
        policy=planned.policy,
        cache=memory.cache,
        slots=SlotTable(config.scheduling.max_running),
        max_batch_tokens=config.scheduling.max_batch_tokens,
        chunked_prefill=config.scheduling.chunked_prefill,
        clock=clock,
    )
    token_limit = spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)
    runner = _open_runner(planned, planner, model, ops, memory, token_limit)
    speculator = _open_speculator(planned, checkpoint, planner, runner, module)
    ends = eos_token_ids(checkpoint, tokenizer)
    constraints = open_constraints(
        planned,
        tokenizer,
        token_limit=token_limit,
        eos_token_ids=ends,
        jumps=runner.drafting is None,
        clock=clock,
    )
    committer = Committer(
        planner=planner,
        needs=runner.needs,
        tokenizer=tokenizer,
        clock=clock,
        speculator=speculator,
    )
    limits = Limits(
        vocab_size=token_limit,
        max_model_len=spec.max_model_len,
        capacity=memory.cache.capacity,
        max_running=config.scheduling.max_running,
        max_batch_tokens=config.scheduling.max_batch_tokens,
        chunked_prefill=config.scheduling.chunked_prefill,
        eos_token_ids=ends,
        cache_domain=cache_domain(planned, checkpoint),
        extra_arguments={name: argument for info in planned.stages for name, argument in info.arguments.items()},
    )
    connect(planner.observer, planned, sinks, planner=planner, speculator=speculator, model=model)
    core = EngineCore(
        planner=planner,
        runner=runner,
        committer=committer,
        ahead=1 if planned.runs_ahead else 0,
        speculator=speculator,
        constraints=None if isinstance(constraints, str) else constraints,
        clock=clock,
    )
    return Engine(
        planned=planned,
        core=core,
        intake=Intake(limits, tokenizer, constraints),
        tokenizer=tokenizer,
        ops=ops,
        model=model,
        sinks=sinks,
        memory=memory.cache_bytes,
    )


@attrs.frozen(kw_only=True)
class _LoadedModule:
    """A drafter's own model, and the layouts of its cache groups by the engine's names of them."""

    module: Model
    layouts: Mapping[str, KVLayout]


def _load_model(planned: PlannedEngine, checkpoint: Checkpoint, ops: OpTable, progress: Callable[[str], None]) -> Model:
    return planned.definition.build(
        ModelContext(
            spec=planned.spec,
            config=checkpoint.config,
            ops=ops,
            weights=checkpoint.weights,
            device=planned.device.torch_device,
            progress=progress,
            experts=planned.experts,
        )
    )


def _load_module(
    planned: PlannedEngine,
    checkpoint: Checkpoint,
    model: Model,
    progress: Callable[[str], None],
    wrap_op: WrapOp | None,
) -> _LoadedModule | None:
    found = _planned_module(planned)
    if found is None:
        return None
    ops = freeze(found.choices, planned.providers, planned.context_for, wrap_op)
    module = build_module(
        found,
        ops,
        checkpoint=checkpoint,
        target=model if shares_ends(planned.plan.choices, found.choices) else None,
        device=planned.device.torch_device,
        progress=progress,
    )
    layouts = {PREFIX + g.name: getattr(ops, group_slot(g)) for g in found.spec.cache_groups}
    return _LoadedModule(module=module, layouts=layouts)


def _planned_module(planned: PlannedEngine) -> PlannedModule | None:
    return None if planned.drafter is None else planned.drafter.module


def _allocate(planned: PlannedEngine, ops: OpTable, module: _LoadedModule | None) -> CacheMemory:
    """Caches of the model and of a drafter's model."""
    found = _planned_module(planned)
    layouts: dict[str, KVLayout] = {g.name: getattr(ops, group_slot(g)) for g in planned.spec.cache_groups}
    layouts |= {} if module is None else module.layouts
    return allocate_caches(
        planned, (*planned.spec.cache_groups, *(() if found is None else found.cache_groups)), layouts
    )


def _open_runner(
    planned: PlannedEngine,
    planner: Planner,
    model: Model,
    ops: OpTable,
    memory: CacheMemory,
    token_limit: int,
) -> Runner:
    spec, device = planned.spec, planned.device
    drafts = planned.config.speculation.max_draft_tokens
    return Runner(
        device=device,
        stream=planner.observer.timed(device.stream(overlap=planned.runs_ahead)),
        model=model,
        ops=ops,
        cache=memory.cache,
        layer_caches=memory.layer_caches,
        slots=planner.slots,
        vocab_size=spec.vocab_size,
        token_limit=token_limit,
        extra_stages=planned.stages,
        graphs=_graphs(planned, model, ops, memory.cache, memory.layer_caches),
        groups=[g.name for g in spec.cache_groups],
        spare=0 if planned.drafter is None else reserve(_planned_module(planned), drafts),
    )


def _open_speculator(
    planned: PlannedEngine,
    checkpoint: Checkpoint,
    planner: Planner,
    runner: Runner,
    module: _LoadedModule | None,
) -> Speculator | None:
    if planned.drafter is None:
        return None
    speculator, source = open_speculation(
        planned.drafter,
        planned.config,
        planner=planner,
        runner=runner,
        module=None if module is None else module.module,
        target=str(checkpoint.path),
        key=cost_key(planned, checkpoint),
    )
    if source:
        planned.plan = attrs.evolve(planned.plan, facts={**planned.plan.facts, "cost table": source})
    return speculator


def _graphs(
    planned: PlannedEngine, model: Model, ops: OpTable, cache: KVCache, layer_caches: Mapping[str, Sequence[LayerCache]]
) -> DecodeGraphs | None:
    """Recorded decode steps, of up to as many rows as may run.

    Raises:
        ConfigError: ``scheduling.decode_graphs`` is true and the memory has no room for all of them.
    """
    if not planned.records_graphs:
        return None
    max_rows = min(planned.config.scheduling.max_running, planned.config.scheduling.max_batch_tokens)
    graphs = DecodeGraphs(
        device=planned.device,
        model=model,
        ops=ops,
        cache=cache,
        layer_caches=layer_caches,
        max_rows=max_rows,
        max_model_len=planned.spec.max_model_len,
    )
    recorded = graphs.capture()
    if recorded < max_rows:
        lacking = f"up to {recorded} rows: the memory had no room for more" if recorded else "the memory had no room"
        if planned.config.scheduling.decode_graphs is True:
            raise ConfigError(f"scheduling.decode_graphs=true: {lacking}; lower kv_cache.memory_fraction")
        fact = f"{ON} {lacking}" if recorded else f"operator by operator: {lacking} to record steps"
        planned.plan = attrs.evolve(planned.plan, facts={**planned.plan.facts, "decode_graphs": fact})
    return graphs


def cache_domain(planned: PlannedEngine, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What two engines must share for their cache blocks to be interchangeable: model, numerics, format, layouts.

    A feature that changes what a model computes, such as adapters, which do not exist yet, would add its name here.
    """
    model = planned.config.model
    numerics = f"{planned.spec.dtype} qdq={model.qdq} fp8_activations={model.fp8_activations}"
    entries = [f"{g.name}.{e.name}={e.dtype}" for g in planned.spec.cache_groups for e in g.entries]
    layouts = [f"{c.slot}={c.provider}" for c in planned.plan.choices if c.op.startswith("kv_layout.")]
    return (str(checkpoint.path), planned.spec.architecture, numerics, *entries, *layouts)


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a generation, from tokenizer, generation_config.json and config.json.

    Raises:
        CheckpointError: one of the files holds something else than an id or a list of ids.
    """
    ids: list[int] = list(tokenizer.eos_token_ids) if tokenizer is not None else []
    for file, source in (("generation_config.json", checkpoint.generation_config), ("config.json", checkpoint.config)):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in found):
            raise CheckpointError(f"{file}: eos_token_id={value!r}: expected a token id, or a list of them")
        ids.extend(found)
    return tuple(dict.fromkeys(ids))
