"""Puts a drafter to work in an engine: its module, its schedule with measured costs, its part of runner and planner."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepinfer_core.api import DraftSchedule, Model, ModelBatch
from deepinfer_core.plugins import guarded

from .failed_memory import release_memory
from .planner import Planner
from .runner import Runner
from .speculation import DeviceSpeculator, Speculator
from .speculation_device import DraftRuntime
from .speculation_module import PlannedDrafter, module_caches, reserve, start_drafter
from .speculation_plan import DraftPlanner
from .speculation_rows import BlockRows

if TYPE_CHECKING:
    from deepinfer_core.checkpoint import Checkpoint
    from deepinfer_core.config import EngineConfig

    from .planning import PlannedEngine


def open_speculation(
    planned: PlannedDrafter,
    config: EngineConfig,
    *,
    planner: Planner,
    runner: Runner,
    module: Model | None,
    target: str,
    key: Mapping[str, str],
) -> tuple[Speculator, str]:
    """The speculator of an engine, and where its cost table came from ("" without one)."""
    depth = config.speculation.max_draft_tokens
    made = planned.info.factory
    what = f"speculation.method {planned.info.name!r}"
    drafter: Any = guarded(what, planned.plugin, made, lambda: made.load()(planned.settings))
    if planned.on_host:
        planner.judges_by_rejection = config.speculation.verify == "rejection"
        return Speculator(drafter, max_draft_tokens=depth, token_limit=runner.token_limit), ""
    start_drafter(drafter, planned, module, config, target, runner.token_limit)
    planner.judges_by_rejection = config.speculation.verify != "exact"
    schedule: DraftSchedule | None = None
    source = ""
    if config.speculation.schedule == "confidence":
        assert planned.info.schedule is not None
        rule = planned.info.schedule
        schedule = guarded(f"schedule of {what}", planned.plugin, rule, lambda: rule.load()(planned.settings))
        sizes = step_sizes(min(config.scheduling.max_running * (depth + 1), config.scheduling.max_batch_tokens))
        source = schedule.start(StepProbe(runner).seconds, sizes, key)
    planner.drafting = DraftPlanner(
        cache=planner.cache,
        slots=planner.slots,
        depth=depth,
        max_model_len=planner.cache.max_model_len,
        reserve=0 if module is None else reserve(planned.module, depth),
        schedule=schedule,
        judges_by_rejection=planner.judges_by_rejection,
    )
    own = None if planned.module is None else planned.module.spec.draft
    runner.drafting = DraftRuntime(
        drafter,
        device=runner.device,
        state=runner.state.sampling,
        sampler=runner.sampler,
        append=runner.ops.append_tokens.run,
        layouts=runner.block_layouts,
        step_layouts=runner.step_layouts,
        cache=planner.cache,
        caches=module_caches(planned.module, runner.layer_caches),
        taps=() if own is None else own.taps,
        keep=getattr(module, "keep", torch.clone),
        depth=depth,
        most_rows=config.scheduling.max_batch_tokens,
        token_limit=runner.token_limit,
        vocab_size=runner.vocab_size,
        slots=planner.slots.slots,
        always_judge=config.speculation.verify == "rejection",
        schedule=schedule,
    )
    speculator = DeviceSpeculator(drafter, max_draft_tokens=depth, token_limit=runner.token_limit)
    speculator.runtime = runner.drafting
    return speculator, source


def step_sizes(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: step sizes worth measuring, up to ``largest``."""
    sizes = {1, largest}
    size = 2
    while size <= largest:
        sizes |= {size, min(size + size // 2, largest)}
        size *= 2
    return sorted(sizes)


PROBE_CONTEXT = 256
"""Tokens before each row of a measured step, where the longest context is longer."""


class StepProbe:
    """Measures the target on rows that belong to nobody, before any request: they read what lies in free blocks and
    write to the null block."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        cache = runner.cache
        free = min((group.pool.num_usable for group in cache.groups.values()), default=0)
        self._blocks = min(free, min(PROBE_CONTEXT, cache.max_model_len - 1) // cache.block_size)
        self._context = self._blocks * cache.block_size
        self._tokens = np.random.default_rng(0)  # other ones each time, since other tokens use other experts

    def seconds(self, rows: int, each: int = 1) -> float:
        """A :class:`~deepinfer_core.api.MeasureStep`: forward pass and logits, after the inputs are there."""
        runner = self._runner
        counts = np.full(-(-rows // each), each, np.int64)
        counts[-1] = rows - each * (len(counts) - 1)
        caches = runner.target_caches
        room = -(-(self._context + each) // runner.cache.block_size)
        read = np.zeros(room, np.int32)
        read[: self._blocks] = np.arange(1, self._blocks + 1)
        tables = {name: np.repeat(read[None], len(counts), axis=0) for name in caches}

        def work() -> float:
            with torch.inference_mode():
                starts = np.full(len(counts), self._context, np.int64)
                layouts = runner.block_layouts(BlockRows(starts=starts, counts=counts, tables=tables))
                positions = next(iter(layouts.values())).positions if layouts else None
                upload = runner.device.upload
                batch = ModelBatch(
                    token_ids=upload(self._tokens.integers(runner.token_limit, size=rows)),
                    positions=upload(np.full(rows, self._context, np.int64)) if positions is None else positions,
                    layouts=layouts,
                    caches=caches,
                )
                started = time.perf_counter()
                logits = runner.model.logits(runner.model.forward(batch, runner.model.plan(batch)))
                runner.device.download(logits.argmax(dim=-1))
                return time.perf_counter() - started

        try:
            return runner.stream.submit(work).wait()
        except Exception as error:
            if not runner.device.is_out_of_memory(error):
                raise
            release_memory(error)
            raise MemoryError(f"a step of {rows} rows") from error


def cost_key(planned: PlannedEngine, checkpoint: Checkpoint) -> dict[str, str]:
    """What a measurement of step costs holds for."""
    plan = planned.plan
    return {
        "model": str(checkpoint.path),
        "context": str(PROBE_CONTEXT),
        "architecture": planned.spec.architecture,
        "dtype": planned.spec.dtype,
        "device": f"{plan.accelerator} {plan.device.get('arch', '')}: {plan.device.get('evidence', '')}",
        "threads": str(planned.device.num_threads),
        "core": plan.core,
        "torch": torch.__version__,
        "plugins": ",".join(f"{record.name}={record.version}" for record in plan.plugins),
        "operators": ",".join(sorted({choice.provider for choice in plan.choices})),
    }
