"""DeepSeek-V4 run in any steps one likes, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch

from deepinfer_core.api import ExpertShare, ModelBatch, ModelContext, OpRequest, ProcessGroup, StepLayout
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.config import load_config
from deepinfer_core.engine.layout_choice import group_slot
from deepinfer_core.engine.planning import PlannedEngine, make_plan
from deepinfer_core.plugins import OpTable, freeze

BLOCK = 16


def plan_of(
    path: Path,
    architecture: str | None = None,
    experts: ExpertShare | None = None,
    group: ProcessGroup | None = None,
    **settings: Any,
) -> PlannedEngine:
    """The plan of a checkpoint with block_size 16 unless told otherwise; ``architecture``: a draft module of it."""
    overrides = {"model.path": str(path), "kv_cache.block_size": BLOCK, **settings}
    with open_checkpoint(path) as checkpoint:
        if architecture is not None:
            checkpoint = attrs.evolve(checkpoint, config={**checkpoint.config, "architectures": [architecture]})
        return make_plan(load_config(overrides=overrides), checkpoint, {}, experts=experts, group=group)


Build = Callable[[OpRequest], Any]
Mutant = Callable[[str, OpRequest, Build], Any]
"""``(slot, request, build) -> operator`` in place of the slot's own, or None to leave it."""


def mutated(ops: OpTable, planned: PlannedEngine, mutant: Mutant) -> SimpleNamespace:
    """The table with what the mutant replaces."""
    changes: dict[str, Any] = {}
    build = planned.context_for("reference").reference
    for slot, request in planned.spec.ops.items():
        replacement = mutant(slot, request, build)
        if replacement is not None:
            changes[slot] = replacement
    assert changes, "the mutant changed nothing"
    slots: tuple[str, ...] = type(ops).__slots__
    return SimpleNamespace(**{slot: getattr(ops, slot) for slot in slots} | changes)


class Stepper:
    """A loaded model and its caches, run in steps the test chooses.

    Every request has block tables of its own, shuffled differently in each group. Blocks that slid out of a window
    are taken away and filled with NaN, as is the null block: reading what must not be read shows.
    """

    def __init__(
        self,
        path: Path,
        *,
        length: int = 96,
        requests: int = 3,
        seed: int = 0,
        mutant: Mutant | None = None,
        architecture: str | None = None,
        read: list[str] | None = None,
        experts: ExpertShare | None = None,
        group: ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        planned = plan_of(path, architecture, experts, group, **settings)
        self.ops: Any = freeze(planned.plan.choices, planned.providers, planned.context_for)
        if mutant is not None:
            self.ops = mutated(self.ops, planned, mutant)
        self.spec = planned.spec
        self.block = planned.config.kv_cache.block_size
        with open_checkpoint(path) as checkpoint:
            self.model: Any = planned.definition.build(
                ModelContext(
                    spec=planned.spec,
                    config=checkpoint.config,
                    ops=self.ops,
                    weights=checkpoint.weights,
                    device=torch.device("cpu"),
                    progress=(read if read is not None else []).append,
                    experts=experts,
                )
            )
        blocks = -(-length // self.block)
        generator = np.random.default_rng(seed)
        self.tables = {
            g.name: generator.permutation(requests * blocks).reshape(requests, blocks).astype(np.int32) + 1
            for g in self.spec.cache_groups
        }
        self.caches = {
            g.name: getattr(self.ops, group_slot(g)).allocate(requests * blocks + 1) for g in self.spec.cache_groups
        }
        self.full_tables = {name: table.copy() for name, table in self.tables.items()}
        for name in self.caches:
            self._poison(name, 0)

    def batch(self, parts: Sequence[tuple[int, Sequence[int], int]], redirect: bool = False) -> ModelBatch:
        """A step of ``(request, its new tokens, position of the first)``; ``redirect``: writes go to the null block."""
        lens = [len(tokens) for _, tokens, _ in parts]
        starts = [start for _, _, start in parts]
        spans = [np.arange(s, s + n) for s, n in zip(starts, lens, strict=True)]
        positions = np.concatenate([np.zeros(0, np.int64), *spans])
        owners = np.repeat(np.arange(len(parts)), lens)
        contexts = np.array(starts) + np.array(lens) if parts else np.zeros(0)
        layouts = {}
        for name, table in self.tables.items():
            mine = table[[request for request, _, _ in parts]]
            slots = mine[owners, positions // self.block].astype(np.int64) * self.block + positions % self.block
            layouts[name] = StepLayout(
                block_size=self.block,
                cu_seqlens=torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32),
                seq_lens=torch.tensor(contexts, dtype=torch.int32),
                positions=torch.tensor(positions),
                block_table=torch.tensor(mine, dtype=torch.int32),
                slot_mapping=torch.tensor(positions % self.block if redirect else slots, dtype=torch.int64),
                host_query_lens=np.array(lens, np.int32),
                host_seq_lens=contexts.astype(np.int32),
                max_query_len=max(lens, default=0),
                max_seq_len=int(max(contexts, default=0)),
            )
        ids = [token for _, tokens, _ in parts for token in tokens]
        return ModelBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            layouts=layouts,
            caches=self.caches,
        )

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]], redirect: bool = False) -> torch.Tensor:
        """Log-probabilities of every row, ``[T, vocab]``."""
        with torch.inference_mode():
            batch = self.batch(parts, redirect)
            hidden = self.model.forward(batch, self.model.plan(batch))
            return torch.log_softmax(self.model.logits(hidden).double(), -1)

    def run(self, tokens: Sequence[int], cuts: Sequence[int], request: int = 0, start: int = 0) -> torch.Tensor:
        """One text in chunks that end at ``cuts``."""
        rows = []
        for end in cuts:
            rows.append(self.step([(request, tokens[start:end], start)]))
            start = end
            self.slide(request, start)
        return torch.cat(rows)

    def slide(self, request: int, computed: int) -> None:
        """Take away the window blocks that no query from position ``computed`` on may read."""
        for group in self.spec.cache_groups:
            if group.window is None:
                continue
            for number in range(max(computed - group.window + 1, 0) // self.block):
                self._poison(group.name, int(self.full_tables[group.name][request, number]))
                self.tables[group.name][request, number] = 0

    def _poison(self, group: str, block: int) -> None:
        for layer in self.caches[group]:
            for tensor in layer.values():
                tensor[block] = float("nan")


def chunk_ends(length: int, size: int) -> list[int]:
    return [*range(size, length, size), length]
