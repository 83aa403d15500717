"""Puts an engine together: operators, weights, caches, loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from deepinfer_core.api import (
    CacheGroupSpec,
    ConfigError,
    KVLayout,
    LayerCache,
    MemoryInfo,
    Model,
    ModelContext,
)
from deepinfer_core.checkpoint import Checkpoint, check_tensors
from deepinfer_core.plugins import OpTable, WrapOp, freeze
from deepinfer_core.tokenizer import Tokenizer, check_tokenizer

from .commit import Committer
from .constraint_open import open_constraints
from .core import EngineCore
from .decode_graphs import DecodeGraphs
from .intake import Intake, Limits
from .kv_cache import KVCache
from .layout_choice import group_slot
from .open_observer import OpenSink, connect, open_sinks
from .planner import Planner
from .planning import PlannedEngine
from .runner import Runner
from .slot_table import SlotTable
from .speculation_module import PREFIX, build_module, reserve, shares_ends
from .speculation_start import cost_key, open_speculation

HOST_FRACTION, DEVICE_FRACTION = 0.25, 0.9
"""Share of free memory the caches may take when ``kv_cache.memory_fraction`` is not set."""


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
    """
    spec, config, device = planned.spec, planned.config, planned.device
    check_tensors(checkpoint.weights, spec.tensors)
    if tokenizer is not None:
        check_tokenizer(tokenizer, spec.vocab_size)
    sinks = open_sinks(planned)
    planned.registry.notify("deepinfer_worker_start", plan=planned.plan, rank=0)
    ops = freeze(planned.plan.choices, planned.providers, planned.context_for, wrap_op)
    planned.registry.freeze()
    model = planned.definition.build(
        ModelContext(
            spec=spec,
            config=checkpoint.config,
            ops=ops,
            weights=checkpoint.weights,
            device=device.torch_device,
            progress=progress,
            experts=planned.experts,
        )
    )
    layouts: dict[str, KVLayout] = {g.name: getattr(ops, group_slot(g)) for g in spec.cache_groups}
    drafter = planned.drafter
    planned_module = None if drafter is None else drafter.module
    module = None
    if planned_module is not None:
        module_ops = freeze(planned_module.choices, planned.providers, planned.context_for, wrap_op)
        own = {g.name: getattr(module_ops, group_slot(g)) for g in planned_module.spec.cache_groups}
        layouts |= {PREFIX + name: layout for name, layout in own.items()}
        module = build_module(
            planned_module,
            module_ops,
            checkpoint=checkpoint,
            target=model if shares_ends(planned.plan.choices, planned_module.choices) else None,
            device=device.torch_device,
            progress=progress,
        )
    groups = (*spec.cache_groups, *(() if planned_module is None else planned_module.cache_groups))
    block_bytes = {name: layout.block_bytes() for name, layout in layouts.items()}
    num_blocks = _num_blocks(planned, groups, block_bytes, device.memory())
    layer_caches: dict[str, list[LayerCache]] = {n: layout.allocate(num_blocks[n]) for n, layout in layouts.items()}
    slots = SlotTable(config.scheduling.max_running)
    cache = KVCache(
        groups,
        num_blocks,
        block_size=config.kv_cache.block_size,
        slots=slots.slots,
        max_model_len=spec.max_model_len,
        prefix_cache=config.kv_cache.prefix_cache,
        retain_windows=config.kv_cache.window_retention == "full",
    )
    planner = Planner(
        policy=planned.policy,
        cache=cache,
        slots=slots,
        max_batch_tokens=config.scheduling.max_batch_tokens,
        chunked_prefill=config.scheduling.chunked_prefill,
        clock=clock,
    )
    token_limit = spec.vocab_size if tokenizer is None else min(spec.vocab_size, tokenizer.vocab_size)
    ahead = 1 if planned.runs_ahead else 0
    stream = planner.observer.timed(device.stream(overlap=bool(ahead)))
    runner = Runner(
        device=device,
        stream=stream,
        model=model,
        ops=ops,
        cache=cache,
        layer_caches=layer_caches,
        slots=slots,
        vocab_size=spec.vocab_size,
        token_limit=token_limit,
        extra_stages=planned.stages,
        graphs=None if module is not None else _graphs(planned, model, ops, cache, layer_caches),
        groups=[g.name for g in spec.cache_groups],
        spare=0 if drafter is None else reserve(planned_module, config.speculation.max_draft_tokens),
    )
    speculator = None
    if drafter is not None:
        speculator, source = open_speculation(
            drafter,
            config,
            planner=planner,
            runner=runner,
            module=module,
            target=str(checkpoint.path),
            key=cost_key(planned, checkpoint),
            delayed=ahead > 0,
        )
        if source:
            planned.plan = attrs.evolve(planned.plan, facts={**planned.plan.facts, "cost table": source})
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
        device=device,
        tokenizer=tokenizer,
        clock=clock,
        speculator=speculator,
    )
    limits = Limits(
        vocab_size=token_limit,
        max_model_len=spec.max_model_len,
        capacity=cache.capacity,
        max_running=slots.slots,
        max_batch_tokens=config.scheduling.max_batch_tokens,
        chunked_prefill=config.scheduling.chunked_prefill,
        eos_token_ids=ends,
        cache_domain=cache_domain(planned, checkpoint),
        extra_arguments={name: argument for info in planned.stages for name, argument in info.arguments.items()},
    )
    connect(planner.observer, planned, sinks, planner=planner, speculator=speculator, model=model)
    return Engine(
        planned=planned,
        core=EngineCore(
            planner=planner,
            runner=runner,
            committer=committer,
            ahead=ahead,
            speculator=speculator,
            constraints=None if isinstance(constraints, str) else constraints,
            clock=clock,
        ),
        intake=Intake(limits, tokenizer, constraints),
        tokenizer=tokenizer,
        ops=ops,
        model=model,
        sinks=sinks,
        memory={f"cache_{name}": num_blocks[name] * size for name, size in block_bytes.items()},
    )


def _graphs(
    planned: PlannedEngine, model: Model, ops: OpTable, cache: KVCache, layer_caches: Mapping[str, list[LayerCache]]
) -> DecodeGraphs | None:
    """Recorded decode steps, of up to as many rows as may run."""
    if not planned.records_graphs:
        return None
    graphs = DecodeGraphs(
        device=planned.device,
        model=model,
        ops=ops,
        cache=cache,
        layer_caches=layer_caches,
        max_rows=min(planned.config.scheduling.max_running, planned.config.scheduling.max_batch_tokens),
        max_model_len=planned.spec.max_model_len,
    )
    graphs.capture()
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
    """Every id that ends a generation, from tokenizer, generation_config.json and config.json."""
    ids: list[int] = list(tokenizer.eos_token_ids) if tokenizer is not None else []
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            ids.extend(value if isinstance(value, list) else [value])
    return tuple(dict.fromkeys(ids))


def _num_blocks(
    planned: PlannedEngine, groups: Sequence[CacheGroupSpec], block_bytes: Mapping[str, int], memory: MemoryInfo
) -> dict[str, int]:
    """Blocks of each group, null block included.

    A full group gets what its share of memory allows, and never more than all requests at full length could
    use; a window group what running requests can look back on plus one step's rows.
    """
    config, spec = planned.config, planned.spec
    # Drafts being verified, and as many more that are being made.
    ahead = 0 if planned.drafter is None else 2 * config.speculation.max_draft_tokens
    running, block_size = config.scheduling.max_running, config.kv_cache.block_size
    if config.kv_cache.num_blocks is not None:
        _check_window_blocks(groups, config.kv_cache.num_blocks, block_size)
        return {g.name: config.kv_cache.num_blocks for g in groups}
    most = {
        g.name: _most_blocks(g, spec.max_model_len, running, config.scheduling.max_batch_tokens, block_size, ahead)
        for g in groups
    }
    default = HOST_FRACTION if planned.device.info.type == "cpu" else DEVICE_FRACTION
    budget = memory.free * (config.kv_cache.memory_fraction or default)
    wanted = sum(most[name] * size for name, size in block_bytes.items())
    share = min(1.0, budget / wanted) if wanted else 1.0
    blocks = {name: max(2, int(count * share)) for name, count in most.items()}
    need = -(-spec.max_model_len // block_size) + 1
    for group in groups:
        if blocks[group.name] < min(need, most[group.name]):
            lowest = need * block_bytes[group.name]
            raise ConfigError(
                f"kv_cache: {budget / 2**20:.0f} MiB give group {group.name!r} {blocks[group.name]} blocks, fewer than "
                f"one request of max_model_len={spec.max_model_len} needs ({lowest / 2**20:.0f} MiB): "
                "lower model.max_model_len or raise kv_cache.memory_fraction"
            )
    return blocks


def _check_window_blocks(groups: Sequence[CacheGroupSpec], num_blocks: int, block_size: int) -> None:
    """Refuse pools too small for one row of a model that has windows only; others are bounded by their length."""
    windows = [g.window for g in groups if g.window is not None]
    need = 2 + max((-(-(window - 1) // block_size) for window in windows), default=0)
    if groups and len(windows) == len(groups) and num_blocks < need:
        raise ConfigError(
            f"kv_cache.num_blocks={num_blocks}: a window of {max(windows)} tokens needs at least {need} "
            f"blocks of {block_size}, the null block included"
        )


def _most_blocks(
    group: CacheGroupSpec, max_model_len: int, running: int, batch_tokens: int, block_size: int, ahead: int
) -> int:
    if group.window is None:
        return running * -(-max_model_len // block_size) + 1
    window = running * (-(-(group.window + ahead) // block_size) + 2)
    return min(window + -(-batch_tokens // block_size), running * -(-max_model_len // block_size)) + 1
