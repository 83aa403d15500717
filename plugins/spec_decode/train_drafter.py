"""Train draft modules for the demo model of the DeepSeek-V4 architecture, on text that it wrote itself.

    PYTHONPATH=models/demo_v4 python plugins/spec_decode/train_drafter.py --data DIR --out DIR

``--data`` is what ``deepinfer_demo_v4.recipe.corpus`` wrote: prompts are windows of its training text, those of the
evaluation come from the files that took no part in training. The target continues them, half at temperature 1, a
quarter at 0.5 and a quarter greedily, and is frozen. Then, for the same number of steps on the same text:

* ``dspark``: one stage, Markov head, confidence head (arXiv:2607.05147);
* ``dflash``: the same without the two heads;
* ``mtp``: the next-token module.

A block of gamma rows follows each anchor; its position k weighs ``exp(-(k-1)/gamma)``. The loss is
``0.1 CE + 0.9 ||p_d - p_t||_1``, and for the confidence ``BCE(c, 1 - ||p_d - p_t||_1 / 2)``. Stages start as the
target's last layer. Written are checkpoints with released names that lack what the target's has, and
``evaluation.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.attention import Selection
from deepinfer_demo_v4.recipe.corpus import read_stream
from deepinfer_demo_v4.recipe.forward import block, layer_weights
from deepinfer_demo_v4.recipe.layers import Weights, coefficients, collapse, experts, linear, merge, mix, rms
from deepinfer_demo_v4.recipe.optimiser import Optimiser
from deepinfer_demo_v4.recipe.rotary import Angles, angles
from deepinfer_demo_v4.recipe.shape import Shape
from safetensors.torch import save_file
from torch.nn import functional

TAPS = (1, 3, 5)
GAMMA, RANK, NOISE = 7, 64, 2
PREFIX = "mtp.0."
KINDS = ("dspark", "dflash", "mtp")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=2048, help="sequences of the target's to train on")
    parser.add_argument("--held-out", type=int, default=256, help="sequences to evaluate on")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=1500, help="of each module")
    parser.add_argument("--seconds", type=float, default=150.0, help="for all training; fewer steps where it is short")
    parser.add_argument("--batch", type=int, default=256, help="sequences of a step")
    parser.add_argument("--anchors", type=int, default=8, help="blocks of each sequence of a step")
    parser.add_argument("--matrix-rate", type=float, default=0.01)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@dataclass(frozen=True)
class Text:
    """Sequences of the target's, and what it computed over them.

    ``ids [B, T]``; ``features [B, T, taps * D]`` means over the streams leaving the tapped layers; ``streams
    [B, T, M, D]`` leaving the last; ``hidden [B, T, D]`` normed for the head.
    """

    ids: torch.Tensor
    features: torch.Tensor
    streams: torch.Tensor
    hidden: torch.Tensor

    def rows(self, index: torch.Tensor) -> Text:
        return Text(self.ids[index], self.features[index], self.streams[index], self.hidden[index])


# ---- the target


@torch.no_grad()
def run_target(w: Weights, ids: torch.Tensor, shape: Shape, dtype: torch.dtype) -> Text:
    """One pass over whole sequences."""
    tables = {kind: angles(shape, kind, ids.shape[1], ids.device) for kind in dict.fromkeys(shape.kinds)}
    streams = functional.embedding(ids, w["embed.weight"]).to(dtype)[:, :, None].repeat(1, 1, shape.streams, 1)
    taps = []
    for layer, kind in enumerate(shape.kinds):
        streams = block(streams, ids, layer_weights(w, layer), tables[kind], shape, kind, Selection())[0]
        if layer in TAPS:
            taps.append(streams.float().mean(2).to(dtype))
    return Text(ids, torch.cat(taps, -1), streams, collapse(streams, w, shape))


def in_parts(w: Weights, ids: torch.Tensor, shape: Shape, dtype: torch.dtype, size: int = 128) -> Text:
    """:func:`run_target` in batches."""
    parts = [run_target(w, part, shape, dtype) for part in ids.split(size)]
    return Text(*(torch.cat([getattr(p, f) for p in parts]) for f in ("ids", "features", "streams", "hidden")))


@torch.no_grad()
def generate(
    w: Weights, prompts: torch.Tensor, length: int, shape: Shape, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """``[B, prompt]`` -> ``[B, length]``: half at temperature 1, a quarter at 0.5, a quarter greedily."""
    generator = torch.Generator(prompts.device).manual_seed(seed)
    count = len(prompts)
    temperature = torch.ones(count, 1, device=prompts.device)
    temperature[count // 2 : 3 * count // 4] = 0.5
    temperature[3 * count // 4 :] = 1e-6
    ids = prompts
    tables = {kind: angles(shape, kind, length, ids.device) for kind in dict.fromkeys(shape.kinds)}
    while ids.shape[1] < length:
        cut = {kind: (t[0][: ids.shape[1]], t[1][: ids.shape[1]]) for kind, t in tables.items()}
        streams = functional.embedding(ids, w["embed.weight"]).to(dtype)[:, :, None].repeat(1, 1, shape.streams, 1)
        for layer, kind in enumerate(shape.kinds):
            streams = block(streams, ids, layer_weights(w, layer), cut[kind], shape, kind, Selection())[0]
        logits = linear(collapse(streams[:, -1:], w, shape)[:, 0], w["head.weight"]).float()
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        ids = torch.cat((ids, (logits / temperature - noise).argmax(-1, keepdim=True)), 1)
    return ids


def prompts_of(path: Path, count: int, length: int, seed: int) -> torch.Tensor:
    """Windows of a token stream."""
    stream = read_stream(path).astype(np.int64)
    starts = np.random.default_rng(seed).integers(0, len(stream) - length, count)
    return torch.from_numpy(stream[starts[:, None] + np.arange(length)])


# ---- the modules


def initial(kind: str, target: Weights, shape: Shape, seed: int) -> Weights:
    """A stage that begins as the target's last layer, without what only compressed layers have."""
    generator = torch.Generator().manual_seed(seed)
    last = {
        name: tensor.clone()
        for name, tensor in layer_weights(target, len(shape.kinds) - 1).items()
        if ".compressor." not in name and ".indexer." not in name
    }
    w = {PREFIX + name: tensor for name, tensor in last.items()}
    w |= {
        PREFIX + name: target[name].clone() for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")
    }
    hidden = shape.hidden
    if kind == "mtp":
        w[PREFIX + "e_proj.weight"] = torch.eye(hidden) * 0.1
        w[PREFIX + "h_proj.weight"] = torch.eye(hidden)
        w |= {f"{PREFIX}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
        return w
    w[PREFIX + "main_proj.weight"] = torch.cat([torch.eye(hidden) / len(TAPS)] * len(TAPS), 1)
    w[PREFIX + "main_norm.weight"] = torch.ones(hidden)
    if kind == "dspark":
        w[PREFIX + "markov_head.markov_w1.weight"] = torch.randn(shape.vocab, RANK, generator=generator) * RANK**-0.5
        w[PREFIX + "markov_head.markov_w2.weight"] = torch.randn(shape.vocab, RANK, generator=generator) * 0.02
        w[PREFIX + "confidence_head.proj.weight"] = torch.zeros(1, hidden + RANK)
    return w


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last channels of ``x [..., d]`` by angles that broadcast to ``[..., rotary / 2]``."""
    kept, turned = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((kept, pairs.to(x.dtype)), dim=-1)


def block_attention(
    x: torch.Tensor, context: torch.Tensor, anchors: torch.Tensor, w: Weights, shape: Shape, table: Angles
) -> torch.Tensor:
    """``x [N, K, D]`` rows from each anchor on see one another and the window before: ``context [N, window, D]``."""
    n, k, _ = x.shape
    own = anchors[:, None] + torch.arange(k, device=x.device)
    before = anchors[:, None] - shape.window + torch.arange(shape.window, device=x.device)
    positions = torch.cat((before.clamp(min=0), own), 1)
    kv = rms(linear(torch.cat((context, x), 1), w["attn.wkv.weight"]), w["attn.kv_norm.weight"], shape.eps)
    kv = turn(kv, table[0][positions], table[1][positions])
    low = rms(linear(x, w["attn.wq_a.weight"]), w["attn.q_norm.weight"], shape.eps)
    query = linear(low, w["attn.wq_b.weight"]).unflatten(-1, (shape.heads, shape.head_dim))
    cos, sin = table[0][own][:, :, None], table[1][own][:, :, None]
    query = turn(rms(query, None, shape.eps), cos, sin)
    scores = torch.einsum("nkhd,ncd->nkhc", query, kv).float() * shape.head_dim**-0.5
    hidden = functional.pad(before < 0, (0, k))
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    sink = w["attn.attn_sink"].view(1, 1, -1, 1).expand(n, k, -1, 1)
    weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1].to(x.dtype)
    attended = turn(torch.einsum("nkhc,ncd->nkhd", weights, kv), cos, -sin)
    grouped = attended.reshape(n, k, shape.o_groups, -1)
    low_rank = w["attn.wo_a.weight"].to(x.dtype).unflatten(0, (shape.o_groups, shape.o_rank))
    inner = torch.einsum("nkgi,gri->nkgr", grouped, low_rank).flatten(2)
    return linear(inner, w["attn.wo_b.weight"])


def summed(streams: torch.Tensor, w: Weights, shape: Shape) -> torch.Tensor:
    """The streams' last sum, not normed."""
    z = coefficients(streams, w, "hc_head_", shape)
    pre = torch.sigmoid(z * w["hc_head_scale"] + w["hc_head_base"]) + shape.hyper_eps
    return (pre[..., None] * streams.float()).sum(2).to(streams.dtype)


@dataclass(frozen=True)
class Drafted:
    """Scores ``[N, K, V]`` float32 of drafts 1..K, confidence logits ``[N, K]`` or None."""

    scores: torch.Tensor
    confidence: torch.Tensor | None


def draft_block(
    w: Weights, target: Weights, text: Text, rows: torch.Tensor, anchors: torch.Tensor, shape: Shape, table: Angles
) -> Drafted:
    """Blocks after ``anchors [N]`` of the sequences ``rows [N]``, each token knowing the true one before it."""
    before = anchors[:, None] - shape.window + torch.arange(shape.window, device=anchors.device)
    main = linear(text.features[rows[:, None], before.clamp(min=0)], w["main_proj.weight"])
    context = rms(main, w["main_norm.weight"], shape.eps)
    ids = torch.full((len(rows), GAMMA), NOISE, device=rows.device)
    ids[:, 0] = text.ids[rows, anchors]
    streams = functional.embedding(ids, target["embed.weight"]).to(context.dtype)
    streams = streams[:, :, None].repeat(1, 1, shape.streams, 1)
    x, post, comb = mix(streams, w, "hc_attn_", shape)
    x = block_attention(rms(x, w["attn_norm.weight"], shape.eps), context, anchors, w, shape, table)
    streams = merge(streams, x, post, comb)
    x, post, comb = mix(streams, w, "hc_ffn_", shape)
    x, _ = experts(rms(x, w["ffn_norm.weight"], shape.eps), ids, w, shape)
    y = summed(merge(streams, x, post, comb), w, shape)
    scores = linear(rms(y, w["norm.weight"], shape.eps), target["head.weight"]).float()
    if "markov_head.markov_w1.weight" not in w:
        return Drafted(scores, None)
    previous = text.ids[rows[:, None], anchors[:, None] + torch.arange(GAMMA, device=rows.device)]
    tie = functional.embedding(previous, w["markov_head.markov_w1.weight"]).to(y.dtype)
    scores = scores + linear(tie, w["markov_head.markov_w2.weight"]).float()
    # What the confidence says may not change what is drafted.
    read = torch.cat((y, tie), -1).detach().float()
    return Drafted(scores, functional.linear(read, w["confidence_head.proj.weight"])[..., 0])


def next_tokens(w: Weights, target: Weights, text: Text, shape: Shape, table: Angles) -> torch.Tensor:
    """Scores ``[B, T - 2, V]`` of the token t + 2, from the streams of t and the token t + 1."""
    ids = text.ids[:, 1:-1]
    token = rms(functional.embedding(ids, target["embed.weight"]).to(text.streams.dtype), w["enorm.weight"], shape.eps)
    streams = linear(rms(text.streams[:, :-2], w["hnorm.weight"], shape.eps), w["h_proj.weight"])
    streams = streams + linear(token, w["e_proj.weight"])[:, :, None]
    cut = (table[0][: ids.shape[1]], table[1][: ids.shape[1]])
    streams = block(streams, ids, w, cut, shape, "window", Selection())[0]
    return linear(rms(summed(streams, w, shape), w["norm.weight"], shape.eps), target["head.weight"]).float()


# ---- losses


@dataclass(frozen=True)
class Agreement:
    """``overlap`` is ``1 - ||p_d - p_t||_1 / 2``, the chance that a draft is accepted; ``ce`` of the true token."""

    overlap: torch.Tensor
    ce: torch.Tensor


def agreement(scores: torch.Tensor, target: torch.Tensor, truth: torch.Tensor) -> Agreement:
    """Of scores and target logits ``[..., V]`` and true tokens ``[...]``."""
    logp = torch.log_softmax(scores, -1)
    distance = (logp.exp() - torch.softmax(target, -1)).abs().sum(-1)
    return Agreement(1 - distance / 2, -logp.gather(-1, truth[..., None])[..., 0])


def weights_of(gamma: int, device: torch.device) -> torch.Tensor:
    """``exp(-(k-1)/gamma)`` for k = 1..gamma, with mean 1."""
    w = torch.exp(-torch.arange(gamma, device=device) / gamma)
    return w / w.mean()


def block_loss(found: Drafted, said: Agreement) -> torch.Tensor:
    """``0.1 CE + 0.9 TV`` and, with a confidence head, its BCE."""
    each = 0.1 * said.ce + 0.9 * 2 * (1 - said.overlap)
    if found.confidence is not None:
        wanted = said.overlap.detach().clamp(0, 1)
        each = each + functional.binary_cross_entropy_with_logits(found.confidence, wanted, reduction="none")
    return (each * weights_of(GAMMA, each.device)).mean()


@dataclass
class Piece:
    """One module in training."""

    kind: str
    learned: Weights
    target: Weights
    shape: Shape
    table: Angles
    text: Text
    options: argparse.Namespace
    generator: torch.Generator

    @property
    def stage(self) -> Weights:
        return {name.removeprefix(PREFIX): tensor for name, tensor in self.learned.items()}

    def loss(self) -> torch.Tensor:
        """Of one step's draw of sequences and anchors."""
        o, device = self.options, self.text.ids.device
        batch = torch.randint(len(self.text.ids), (o.batch,), generator=self.generator, device=device)
        if self.kind == "mtp":
            part = self.text.rows(batch[: max(1, o.batch * o.anchors * GAMMA // o.length)])
            scores = next_tokens(self.stage, self.target, part, self.shape, self.table)
            logits = linear(part.hidden[:, 1:-1], self.target["head.weight"]).float()
            said = agreement(scores, logits, part.ids[:, 2:])
            return (0.1 * said.ce + 0.9 * 2 * (1 - said.overlap))[:, o.prompt // 2 :].mean()
        rows = batch.repeat_interleave(o.anchors)
        anchors = torch.randint(o.prompt // 2, o.length - GAMMA, (len(rows),), generator=self.generator, device=device)
        return block_loss(*self.compare(rows, anchors, self.text))

    def compare(self, rows: torch.Tensor, anchors: torch.Tensor, text: Text) -> tuple[Drafted, Agreement]:
        found = draft_block(self.stage, self.target, text, rows, anchors, self.shape, self.table)
        places = anchors[:, None] + torch.arange(GAMMA, device=anchors.device)
        logits = linear(text.hidden[rows[:, None], places], self.target["head.weight"]).float()
        return found, agreement(found.scores, logits, text.ids[rows[:, None], places + 1])

    @torch.no_grad()
    def evaluate(self, held: Text) -> Mapping[str, Any]:
        """Chance of acceptance by position on text from prompts that nobody was trained on, and tokens a round."""
        o, device = self.options, held.ids.device
        if self.kind == "mtp":
            part = held.rows(torch.arange(min(64, len(held.ids)), device=device))
            scores = next_tokens(self.stage, self.target, part, self.shape, self.table)
            logits = linear(part.hidden[:, 1:-1], self.target["head.weight"]).float()
            said = agreement(scores, logits, part.ids[:, 2:])
            chance = float(said.overlap[:, o.prompt :].mean())
            return {"acceptance": [round(chance, 4)], "tokens_a_round": round(1 + chance, 4)}
        rows = torch.arange(len(held.ids), device=device).repeat_interleave(2)
        anchors = torch.linspace(o.prompt, o.length - GAMMA - 1, len(rows), device=device).long()
        found, said = self.compare(rows, anchors, held)
        chances = said.overlap.clamp(0, 1)
        result: dict[str, Any] = {
            "acceptance": [round(float(c), 4) for c in chances.mean(0)],
            "tokens_a_round": round(1 + float(chances.cumprod(1).sum(1).mean()), 4),
        }
        if found.confidence is not None:
            result["confidence"] = [round(float(c), 4) for c in found.confidence.sigmoid().mean(0)]
        return result


def train(piece: Piece, steps: int, say: Callable[[str], None]) -> None:
    """Steps with a linear warm-up and a cosine."""
    optimiser = Optimiser(piece.learned, piece.shape.o_groups, piece.options.matrix_rate, piece.options.rate)
    began = time.perf_counter()
    for step in range(steps):
        loss = piece.loss()
        loss.backward()
        share = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimiser.step(share)
        if step % 250 == 0 or step == steps - 1:
            say(f"{piece.kind} {step}: loss {float(loss.detach()):.4f}, {time.perf_counter() - began:.1f} s")


def leaves(weights: Weights, device: torch.device) -> Weights:
    """On the device; all but the router's bias learn."""
    found = {}
    for name, tensor in weights.items():
        moved = tensor.to(device, torch.float32)
        found[name] = moved.requires_grad_(not name.endswith("gate.bias"))
    return found


def write(kind: str, learned: Weights, config: Mapping[str, Any], out: Path) -> None:
    """config.json and the tensors that the target's checkpoint does not have."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in checkpoint.released(learned).items():
        dtype = torch.float32 if checkpoint.kept_wide(name) else torch.bfloat16
        stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    fields = {**config, "compress_ratios": [*config["compress_ratios"][: config["num_hidden_layers"]], 0]}
    if kind != "mtp":
        fields |= {
            "dspark_block_size": GAMMA,
            "dspark_noise_token_id": NOISE,
            "dspark_target_layer_ids": list(TAPS),
            "dspark_markov_rank": RANK if kind == "dspark" else 0,
        }
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Generate, train three modules, evaluate, write."""
    o = arguments()
    torch.manual_seed(o.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(o.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    shape = Shape.read(config)
    target = {name: tensor.to(device) for name, tensor in checkpoint.load(CHECKPOINT).items()}
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    texts = []
    for name, count, seed in (("train.xz", o.texts, 1), ("held_out.xz", o.held_out, 2)):
        prompts = prompts_of(o.data / name, count, o.prompt, seed + o.seed).to(device)
        parts = [generate(target, part, o.length, shape, dtype, seed) for part in prompts.split(1024)]
        texts.append(in_parts(target, torch.cat(parts), shape, dtype))
        say(f"{name}: {count} sequences of {o.length} tokens")
    text, held = texts
    table = angles(shape, "window", o.length + GAMMA, device)
    results: dict[str, Any] = {}
    steps = o.steps
    for kind in KINDS:
        generator = torch.Generator(device).manual_seed(o.seed + 3)
        learned = leaves(initial(kind, {n: t.cpu() for n, t in target.items()}, shape, o.seed), device)
        piece = Piece(kind, learned, target, shape, table, text, o, generator)
        if kind == KINDS[0]:
            started = time.perf_counter()
            for _ in range(3):
                piece.loss().backward()
            per_step = (time.perf_counter() - started) / 3
            steps = max(1, min(steps, int(o.seconds / len(KINDS) / max(per_step, 1e-3))))
            for tensor in learned.values():
                tensor.grad = None
            say(f"{per_step:.3f} s a pass: {steps} steps each")
        results[kind] = {"before": piece.evaluate(held)}
        train(piece, steps, say)
        results[kind]["after"] = piece.evaluate(held)
        write(kind, learned, config, o.out / f"demo-v4-{kind}")
        say(f"{kind}: {json.dumps(results[kind]['after'])}")
    summary = {"steps": steps, "texts": o.texts, "length": o.length, "gamma": GAMMA, "results": results}
    (o.out / "evaluation.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
