"""Fresh random DeepSeek-V4 models, their oracle in transformers, and a way to run ours in any steps one likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from deepinfer_core.api import ModelBatch, ModelContext, OpRequest, StepLayout
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.config import load_config
from deepinfer_core.engine.choosing import group_slot
from deepinfer_core.engine.planning import PlannedEngine, make_plan
from deepinfer_core.plugins import OpTable, freeze

VOCAB, HCA_RATE, BLOCK = 128, 16, 16
TOLERANCE = 1e-4
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
SLIDING = "sliding_attention"


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """Four layers, one of each kind and a second CSA; 16 index heads, so that scores of exactly 0 are rare."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "partial_rotary_factor": 0.25,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": [SLIDING, CSA, HCA, CSA],
        "compress_rates": {CSA: 4, HCA: HCA_RATE},
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 2,
    }
    config = DeepseekV4Config(**(fields | changes))
    config._attn_implementation = "eager"
    return config


def random_model(seed: int, **changes: Any) -> Any:
    """A model with every constant-initialised tensor randomised, or mistakes would hide."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int], scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    model: Any = DeepseekV4ForCausalLM(tiny_config(**changes))
    model.eval()
    top_k, experts = model.config.num_experts_per_tok, model.config.n_routed_experts
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            if "tid2eid" in name:
                rows = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tensor.shape[0])]
                tensor.copy_(torch.stack(rows))
            elif "norm" in name:
                tensor.copy_(1 + normal(tensor.shape, 0.3))
            elif "scale" in name:
                tensor.copy_(normal(tensor.shape, 0.5) + 1)
            elif tensor.dim() == 1 or "position_bias" in name:
                tensor.copy_(normal(tensor.shape, 0.5))
            elif "experts" in name:
                tensor.copy_(normal(tensor.shape, 6 * tensor.shape[-1] ** -0.5))
            else:
                tensor.copy_(normal(tensor.shape, 1.5 * tensor.shape[-1] ** -0.5))
    return model


@attrs.frozen
class Oracle:
    """transformers' answer for one text: ``logprobs [n, vocab]`` float64, and positions whose choice of entries hangs
    on a score difference below 1e-5 of the scores' size."""

    tokens: list[int]
    logprobs: torch.Tensor
    near_ties: frozenset[int]


def oracle(model: DeepseekV4ForCausalLM, tokens: Sequence[int]) -> Oracle:
    """One full forward pass, without a cache."""
    ids = torch.tensor([list(tokens)])
    scores: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: scores.append(out[0].detach()))
        for name, module in model.named_modules()
        if name.endswith("indexer.scorer")
    ]
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    ties = [p for s in scores for p in _near_ties(s, model.config.index_topk)]
    return Oracle(list(tokens), torch.log_softmax(logits.double(), -1), frozenset(ties))


def _near_ties(scores: torch.Tensor, top_k: int) -> list[int]:
    found = []
    for position in range(scores.shape[0]):
        seen = scores[position, : (position + 1) // 4].sort(descending=True).values
        if len(seen) > top_k and seen[top_k - 1] - seen[top_k] < 1e-5 * seen.abs().max():
            found.append(position)
    return found


def greedy(model: DeepseekV4ForCausalLM, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation by full forward passes."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_tokens(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(found: torch.Tensor, wanted: Oracle, what: str, positions: Sequence[int] | None = None) -> None:
    """Logprobs of these positions (all by default) agree, those from the first near tie on excepted."""
    rows = list(range(len(wanted.tokens))) if positions is None else list(positions)
    clean = [i for i, p in enumerate(rows) if not wanted.near_ties or p < min(wanted.near_ties)]
    difference = (found.double() - wanted.logprobs[rows]).abs().amax(-1)
    worst = float(difference[clean].max()) if clean else 0.0
    assert worst < TOLERANCE, f"{what}: logprobs differ by {worst:.2e} at row {int(difference[clean].argmax())}"


def plan_of(path: Path, architecture: str | None = None, **settings: Any) -> PlannedEngine:
    """The plan of a checkpoint with block_size 16 unless told otherwise; ``architecture``: a draft module of it."""
    overrides = {"model.path": str(path), "kv_cache.block_size": BLOCK, **settings}
    with open_checkpoint(path) as checkpoint:
        if architecture is not None:
            checkpoint = attrs.evolve(checkpoint, config={**checkpoint.config, "architectures": [architecture]})
        return make_plan(load_config(overrides=overrides), checkpoint, {})


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
        **settings: Any,
    ) -> None:
        planned = plan_of(path, architecture, **settings)
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
