"""Tiny DeepSeek-V4 checkpoints with draft stages, and what their drafters should say, by transformers' layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import torch
from v4 import draft_oracle
from v4.draft_oracle import as_drafts, main_streams, rms, stages
from v4.released import released_config, write
from v4.support import random_model

HIDDEN, RANK, BLOCK, NOISE, VOCAB = 64, 6, 5, 99, 128
TARGETS = [1, 2, 3]
PLAIN = {
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "moe_intermediate_size": 32,
    "o_lora_rank": 16,
    "q_lora_rank": 24,
    "quantization_config": None,
    "expert_dtype": None,
    "eos_token_id": None,
}
FIELDS = {"dspark_block_size": BLOCK, "dspark_noise_token_id": NOISE, "dspark_target_layer_ids": TARGETS}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


@attrs.frozen(eq=False)
class V4:
    """A checkpoint, transformers' model of its target and of its stages, and the tensors no layer of theirs has."""

    path: Path
    main: Any
    stage: Any
    extra: dict[str, torch.Tensor]

    def block(self, tokens: list[int]) -> tuple[list[int], list[float]]:
        """The drafts and confidence logits after these tokens, the last of which is the newest, greedily."""
        drafts, confidence, _ = self._spoken(tokens)
        return drafts, confidence

    def margins(self, tokens: list[int]) -> list[float]:
        """How far the score of each of those drafts is above the second best."""
        return self._spoken(tokens)[2]

    def _spoken(self, tokens: list[int]) -> tuple[list[int], list[float], list[float]]:
        taps = main_streams(self.main, tokens[:-1], TARGETS)
        features = torch.cat([tap.mean(1) for tap in taps], -1) @ self.extra["mtp.0.main_proj.weight"].T
        features = rms(features, self.extra["mtp.0.main_norm.weight"])
        block = draft_oracle.dspark(self.stage, features, tokens[-1], NOISE, BLOCK)
        drafts, confidence, margins, previous = [], [], [], tokens[-1]
        for j in range(BLOCK):
            scores = block.logits[j]
            if "mtp.2.markov_head.markov_w1.weight" in self.extra:
                tie = self.extra["mtp.2.markov_head.markov_w1.weight"][previous]
                scores = scores + self.extra["mtp.2.markov_head.markov_w2.weight"] @ tie
                read = self.extra["mtp.2.confidence_head.proj.weight"][0]
                confidence.append(float(read @ torch.cat((block.hidden[j], tie))))
            previous = int(scores.argmax())
            drafts.append(previous)
            best, second = sorted(scores.tolist(), reverse=True)[:2]
            margins.append(best - second)
        return drafts, confidence, margins

    def next_token(self, tokens: list[int]) -> int:
        """The first MTP draft after these tokens."""
        last = self.main.config.num_hidden_layers - 1
        streams = main_streams(self.main, tokens[:-1], [last])[0]
        return int(draft_oracle.mtp(self.stage, self.extra, streams, tokens[1:])[-1].argmax())


def assert_confident(said: list[float], logits: list[float]) -> None:
    """What was said is the sigmoid of these logits. They are sums of terms in the hundreds, so that float32 moves them
    by a hundredth; another context moves them by hundreds."""
    low, high = ((torch.tensor(logits) + by).sigmoid() for by in (-0.05, 0.05))
    assert ((torch.tensor(said) > low - 1e-6) & (torch.tensor(said) < high + 1e-6)).all(), (said, logits)


def dspark(root: Path, *, heads: bool = True, seed: int = 21) -> V4:
    main = random_model(seed)
    stage = stages(seed + 2, 3, main)
    extra = {
        "mtp.0.main_proj.weight": normal(HIDDEN, 3 * HIDDEN, seed=1),
        "mtp.0.main_norm.weight": 1 + normal(HIDDEN, seed=2),
    }
    if heads:
        extra |= {
            "mtp.2.markov_head.markov_w1.weight": normal(VOCAB, RANK, seed=3),
            "mtp.2.markov_head.markov_w2.weight": normal(VOCAB, RANK, seed=4) * 3,
            "mtp.2.confidence_head.proj.weight": normal(1, HIDDEN + RANK, seed=5),
        }
    drafts = as_drafts(draft_oracle.released(stage, root / "stage"), 3)
    tensors = draft_oracle.released(main, root / "main") | drafts | extra
    fields = {**PLAIN, **FIELDS, "dspark_markov_rank": RANK if heads else 0}
    return V4(write(root / "whole", tensors, released_config(3, **fields)), main, stage, extra)


def mtp(root: Path, seed: int = 21) -> V4:
    main = random_model(seed)
    stage = stages(seed + 1, 1, main)
    extra = {f"mtp.0.{n}.weight": normal(HIDDEN, HIDDEN, seed=i) for i, n in enumerate(("e_proj", "h_proj"))}
    extra |= {f"mtp.0.{n}.weight": 1 + normal(HIDDEN, seed=i + 5) for i, n in enumerate(("enorm", "hnorm"))}
    drafts = as_drafts(draft_oracle.released(stage, root / "stage"), 1)
    tensors = draft_oracle.released(main, root / "main") | drafts | extra
    return V4(write(root / "whole", tensors, released_config(1, **PLAIN)), main, stage, extra)
