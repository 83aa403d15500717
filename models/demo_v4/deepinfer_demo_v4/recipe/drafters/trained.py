"""One module in training, and the draws that all modules of a run share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.optimiser import Optimiser
from deepinfer_demo_v4.recipe.rotary import Angles, angles
from deepinfer_demo_v4.recipe.shape import Shape

from .grown import grown
from .losses import Objective, markov_loss, plain_loss, position_weights, reach
from .modules import PROGRAMS, Blocks, Kind, block_rows, initial, mtp_rows, stage_prefix
from .target_text import Text

FIRST_JUDGED = 64
"""The first anchor of an evaluation: where prompts of the usual length end."""
LOSSES: Mapping[str, Callable[..., Any]] = {"markov": markov_loss, "plain": plain_loss}


@dataclass(frozen=True)
class Draw:
    """Sequences of a step and the anchors in them."""

    text: Text
    blocks: Blocks


@dataclass(frozen=True)
class Data:
    """Texts, the target's ends, and how much of them a step takes."""

    train: Text
    held: Text
    embedding: torch.Tensor
    head: torch.Tensor
    table: Angles
    first: int
    gamma: int
    batch: int
    anchors: int
    objective: Objective = "distance"

    @classmethod
    def of(cls, train: Text, held: Text, target: Weights, shape: Shape, o: argparse.Namespace) -> Data:
        table = angles(shape, "window", o.length + o.gamma, train.ids.device)
        ends = target["embed.weight"], target["head.weight"]
        return cls(train, held, *ends, table, o.first, o.gamma, o.batch, o.anchors, o.objective)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for a step's sequences ``[batch]`` and anchors ``[batch * anchors]``, int64, zero."""
        make, device = torch.zeros, self.train.ids.device
        chosen = make(self.batch, dtype=torch.int64, device=device)
        return chosen, make(self.batch * self.anchors, dtype=torch.int64, device=device) + self.first

    def choose(self, places: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> None:
        """Draw a step's sequences and anchors anew, in place."""
        chosen, anchors = places
        chosen.random_(0, len(self.train.ids), generator=generator)
        # The target was not asked about the last position.
        anchors.random_(self.first, self.train.ids.shape[1] - self.gamma, generator=generator)

    def drawn(self, places: tuple[torch.Tensor, torch.Tensor]) -> Draw:
        """The texts at those places; streams of as many sequences as the next-token module reads."""
        chosen, anchors = places
        t = self.train
        streams = t.streams[chosen[: self.whole(len(anchors), t.ids.shape[1])]]
        text = Text(t.ids[chosen], t.temperature[chosen], t.features[chosen], streams, t.hidden[chosen])
        rows = torch.arange(len(anchors), device=t.ids.device) // self.anchors
        return Draw(text, Blocks(rows, anchors))

    def whole(self, blocks: int, length: int) -> int:
        """Sequences that have as many tokens to predict as so many blocks."""
        return max(1, round(blocks * self.gamma / (length - 2 - self.first)))


@dataclass
class Trained:
    """A module and its optimiser."""

    kind: Kind
    learned: Weights
    data: Data
    shape: Shape
    run: Mapping[str, Callable[..., Any]]
    optimiser: Optimiser

    def loss(self, drawn: Draw) -> torch.Tensor:
        """Of one step."""
        return self.judged(drawn, self.run)[0]

    def judged(self, drawn: Draw, run: Mapping[str, Callable[..., Any]]) -> tuple[torch.Tensor, ...]:
        """What the loss function gives: loss, overlap, hits, kept, and the confidence's logits where there are any."""
        if self.kind.family == "mtp":
            return self._next_tokens(drawn, run)
        data, text, at, gamma = self.data, drawn.text, drawn.blocks, self.data.gamma
        newest = text.ids[at.rows, at.anchors]
        y = block_rows(
            self.kind, self.learned, data.embedding, newest, text.features, at, gamma, self.shape, data.table, run
        )
        places = at.anchors[:, None] + torch.arange(gamma, device=y.device)
        rows = at.rows[:, None]
        last = stage_prefix(self.kind.stages - 1)
        w = self.learned
        common = (
            y,
            w[last + "norm.weight"],
            data.head,
            text.hidden[rows, places],
            text.ids[rows, places + 1],
            text.temperature[at.rows],
            position_weights(gamma, y.device),
            self.shape.eps,
        )
        found: tuple[torch.Tensor, ...]
        if not self.kind.rank:
            found = run["plain"](*common, data.objective)
            return found
        heads = (
            w[last + "markov_head.markov_w1.weight"],
            w[last + "markov_head.markov_w2.weight"],
            w[last + "confidence_head.proj.weight"],
        )
        found = run["markov"](*common, text.ids[rows, places], *heads, data.objective)
        return found

    def _next_tokens(self, drawn: Draw, run: Mapping[str, Callable[..., Any]]) -> tuple[torch.Tensor, ...]:
        data, length, first = self.data, drawn.text.ids.shape[1] - 2, self.data.first
        streams = drawn.text.streams[: data.whole(len(drawn.blocks.anchors), length + 2), :-2]
        ids, hidden, temperature = (
            t[: len(streams)] for t in (drawn.text.ids, drawn.text.hidden, drawn.text.temperature)
        )
        y = mtp_rows(self.learned, data.embedding, ids[:, 1:-1], streams, self.shape, data.table, run)
        found: tuple[torch.Tensor, ...] = run["plain"](
            y[:, first:],
            self.learned[stage_prefix(0) + "norm.weight"],
            data.head,
            hidden[:, 1 + first : -1],
            ids[:, 2 + first :],
            temperature,
            torch.ones((), device=y.device),
            self.shape.eps,
        )
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Chance of acceptance by position on text from held-out prompts, and tokens a round, at each temperature:
        where each draft knows the true token before it, and where it knows the one that was drafted, as in use.
        """
        held, device = self.data.held, self.data.held.ids.device
        last = held.ids.shape[1] - 1 - self.data.gamma
        overlaps, hits, kept, said, temperature = [], [], [], [], []
        for part in range(0, len(held.ids), self.data.batch):
            text = held.rows(slice(part, part + self.data.batch))
            rows = torch.arange(len(text.ids), device=device).repeat_interleave(self.data.anchors)
            places = torch.linspace(FIRST_JUDGED, last, self.data.anchors, device=device).long()
            found = self.judged(Draw(text, Blocks(rows, places.repeat(len(text.ids)))), {**PROGRAMS, **LOSSES})
            overlaps.append(found[1])
            hits.append(found[2])
            kept.append(found[3])
            said += [f.sigmoid() for f in found[4:]]
            which = text.temperature[: len(found[1])] if self.kind.family == "mtp" else text.temperature[rows]
            temperature.append(which)
        overlap, hit, at = torch.cat(overlaps).clamp(0, 1), torch.cat(hits).float(), torch.cat(temperature)
        result: dict[str, Any] = {}
        for name, chance, mask in (("sampled", overlap, at == 1), ("greedy", hit, at == 0)):
            chance = chance[mask]
            if self.kind.family == "mtp":
                chance = chance.reshape(-1, 1)
            result[name] = {
                "acceptance": [round(float(c), 4) for c in chance.mean(0)],
                "tokens_a_round": round(1 + float(chance.cumprod(1).sum(1).mean()), 4),
            }
            if name == "sampled" and self.kind.family != "mtp":
                drafted = (overlap * reach(torch.cat(kept)))[mask]
                result[name]["tokens_a_drawn_round"] = round(1 + float(drafted.sum(1).mean()), 4)
            if said:
                result[name]["confidence"] = [round(float(c), 4) for c in torch.cat(said)[mask].mean(0)]
        return result


def leaves(weights: Weights, device: torch.device) -> Weights:
    """On the device; all but the routers' biases learn."""
    return {
        name: tensor.to(device, torch.float32).clone().requires_grad_(not name.endswith("gate.bias"))
        for name, tensor in weights.items()
    }


def start(
    kind: Kind,
    target: Weights,
    data: Data,
    shape: Shape,
    run: Mapping[str, Callable[..., Any]],
    o: argparse.Namespace,
    trained: Path | None = None,
) -> Trained:
    """A module before its first step: from the target's last layers, or a directory that ``export`` wrote, perhaps of
    fewer stages.
    """
    taps = tuple(map(int, o.taps.split(",")))
    first = initial(kind, {n: t.cpu() for n, t in target.items()}, shape, taps, o.seed)
    if trained is not None:
        stored = grown(checkpoint.load(trained), kind, first, shape)
        if {n: t.shape for n, t in stored.items()} != {n: t.shape for n, t in first.items()}:
            raise ValueError(f"{trained}: not a {kind.family} of {kind.stages} stages and rank {kind.rank}")
        first = stored
    learned = leaves(first, data.train.ids.device)
    optimiser = Optimiser(learned, shape.o_groups, o.matrix_rate, o.rate)
    return Trained(kind, learned, data, replace(shape, sinkhorn=o.sinkhorn), run, optimiser)
