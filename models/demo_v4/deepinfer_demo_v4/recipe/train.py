"""Train one piece, and write the model.

    python -m deepinfer_demo_v4.recipe.train --data DIR --out DIR --until 500 [--resume DIR]

``--data`` is what ``recipe.corpus`` wrote. The piece ends ``--until`` seconds after its start, and the learning rate
falls with the time that is left, so a piece fits a machine that is lent by the minute.

A later piece (``--resume DIR`` of an export) starts from the bfloat16 weights. The routers' biases come back with
them; the optimiser's moments do not: Muon's momentum and AdamW's moments start from zero and the learning rate warms up
again, to ``--rate-share`` of its height. Batches are drawn from ``--seed``: give each piece another.

Objective: next-token cross entropy, plus the indexer's divergence (``attention.indexer_loss``), whose gradient reaches
the indexer alone. For the first ``--warm`` of the time CSA layers attend to every visible entry, then to the indexer's
choice. After each step a router's bias moves by ``--bias-rate`` towards the experts that got less than their share
(loss-free balancing, Wang et al. 2024, arXiv:2408.15664).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch.nn import functional

from . import checkpoint
from .attention import Selection
from .corpus import read_stream
from .evaluate import bits_per_byte, byte_lengths
from .forward import block, forward
from .layers import Weights, linear
from .optimiser import Optimiser
from .shape import CONFIG, Shape
from .vocabulary import write_tokenizer_config

START = time.perf_counter()
WARM_STEPS = 100


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--until", type=float, default=480.0, help="seconds from the start of the program")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--warm", type=float, default=0.2, help="share of the time with dense attention")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--rate-share", type=float, default=1.0, help="height of the schedule; lower when resuming")
    parser.add_argument("--bias-rate", type=float, default=1e-3)
    parser.add_argument("--sinkhorn", type=int, default=8, help="rounds while training; they have converged by then")
    parser.add_argument("--compile", default="inductor", help="backend of torch.compile, or no")
    parser.add_argument("--slowest", type=float, default=math.inf, help="seconds a step: give up when slower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--held-out-windows", type=int, help="for a rehearsal")
    return parser.parse_args()


@dataclass
class Trainer:
    """One piece: what every step uses."""

    weights: Weights
    shape: Shape
    stream: torch.Tensor
    optimiser: Optimiser
    options: argparse.Namespace
    run: Callable[..., Any] = block
    head: Callable[..., torch.Tensor] | None = None

    def step(self, generator: torch.Generator, share: float, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """Forward, backward, update, balance."""
        o = self.options
        device = self.stream.device
        starts = torch.randint(len(self.stream) - o.length, (o.batch, 1), generator=generator, device=device)
        rows = self.stream[starts + torch.arange(o.length + 1, device=device)].long()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        selection = Selection(sparse=True, learn=True)
        output = forward(self.weights, rows[:, :-1], self.shape, selection, dtype, self.run, dense)
        loss = (self.head or head_loss)(output.hidden, self.weights["head.weight"], rows[:, 1:])
        (loss + output.index_loss).backward()  # type: ignore[no-untyped-call]
        self.optimiser.step(share)
        worst = self._balance(output.chosen, share)
        return {"loss": loss.detach(), "index_loss": output.index_loss.detach(), "busiest": worst}

    @torch.no_grad()
    def _balance(self, chosen: list[torch.Tensor], share: float) -> torch.Tensor:
        """Move the biases; the busiest expert's load over the mean, worst layer."""
        ratios = []
        for layer, ids in enumerate(chosen):
            each = torch.arange(self.shape.experts, device=ids.device)
            counts = (ids.flatten()[:, None] == each).sum(0).float()
            ratios.append(counts.max() / counts.mean())
            bias = self.weights.get(f"layers.{layer}.ffn.gate.bias")
            if bias is not None:
                bias += self.options.bias_rate * share * torch.sign(counts.mean() - counts)
        return torch.stack(ratios).max()


def head_loss(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats."""
    return functional.cross_entropy(linear(hidden, head).float().flatten(0, 1), targets.flatten())


def schedule(done: float, step: int) -> float:
    """Share of the learning rate: linear warm-up, then a cosine over the piece's time down to 1 %."""
    return min(1.0, (step + 1) / WARM_STEPS) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def leaves(weights: Weights, device: torch.device) -> Weights:
    """On the device; learned ones ask for gradients."""
    found = {}
    for name, tensor in weights.items():
        moved = tensor.to(device)
        found[name] = moved.requires_grad_(moved.is_floating_point() and not name.endswith("gate.bias"))
    return found


def compiled(trainer: Trainer, generator: torch.Generator, dense: torch.Tensor) -> None:
    """Compile the blocks and take a first step without effect; eager blocks where that fails."""
    if trainer.options.compile == "no":
        return
    torch._dynamo.config.cache_size_limit = 32
    began = time.perf_counter()
    try:
        trainer.run = torch.compile(block, backend=trainer.options.compile, dynamic=False)
        trainer.head = torch.compile(head_loss, backend=trainer.options.compile, dynamic=False)
        trainer.step(generator, 0.0, dense)
        print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    except Exception as error:  # the piece goes on without the compiler
        trainer.run, trainer.head = block, None
        for tensor in trainer.weights.values():
            tensor.grad = None
        print(f"not compiled: {type(error).__name__}: {str(error)[:2000]}", flush=True)


def write(trainer: Trainer, out: Path, data: Path) -> None:
    """The model as the engine loads it."""
    checkpoint.save(trainer.weights, out)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    write_tokenizer_config(out)


def train(trainer: Trainer, log: TextIO) -> dict[str, float]:
    """Steps until the time is up; the last record."""
    o, device = trainer.options, trainer.stream.device
    generator = torch.Generator(device=device).manual_seed(o.seed + 1)
    dense = torch.ones((), dtype=torch.bool, device=device)
    compiled(trainer, generator, dense)
    began = last = time.perf_counter()
    length = o.until - (began - START)
    if length <= 0:
        raise SystemExit(f"--until {o.until:g}: {began - START:.0f} s went by before the first step, give more")
    step, record = 0, {}
    while (done := (time.perf_counter() - began) / length) < 1:
        if done >= o.warm:
            dense.fill_(False)
        share = o.rate_share * schedule(done, step)
        values = trainer.step(generator, share, dense)
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock would run ahead of the steps
        if step % 100 == 0 or step in (1, 10, 30):
            now = time.perf_counter()
            record = {name: round(float(value), 4) for name, value in values.items()}
            record |= {"step": step, "tokens": step * o.batch * o.length, "seconds": round(now - began, 1)}
            record |= {"rate": round(share, 4), "since": round(now - last, 2), "sparse": int(done >= o.warm)}
            per_step = (now - last) / 20 if step == 30 else 0.0
            last = now
            log.write(json.dumps(record) + "\n")
            log.flush()
            if step % 500 == 0 or step <= 30:
                print(json.dumps(record), flush=True)
            if per_step > o.slowest or not math.isfinite(record["loss"]) or (step == 500 and record["loss"] > 5):
                raise SystemExit(f"not worth its time: {per_step:.2f} s a step, loss {record['loss']}")
    return {"steps": step, "tokens": step * o.batch * o.length, "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """One piece."""
    options = arguments()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    shape = Shape.read(CONFIG)
    tokens = read_stream(options.data / "train.xz")
    counts = np.bincount(tokens, minlength=shape.vocab)
    stream = torch.from_numpy(tokens.astype(np.int32)).to(device)
    start = checkpoint.load(options.resume) if options.resume else checkpoint.initial(shape, counts, options.seed)
    weights = leaves(start, device)
    optimiser = Optimiser(weights, shape.o_groups, options.matrix_rate, options.rate)
    training = replace(shape, sinkhorn=options.sinkhorn)
    trainer = Trainer(weights, training, stream, optimiser, options)
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{len(stream)} tokens, {sum(t.numel() for t in weights.values() if t.requires_grad)} parameters", flush=True)
    with (options.out / "log.jsonl").open("w") as log:
        summary: dict[str, Any] = dict(train(trainer, log))
        print(json.dumps(summary), flush=True)
        write(trainer, options.out, options.data)
        if device.type == "cuda":
            summary["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        exported = {name: t.to(device) for name, t in checkpoint.load(options.out).items()}
        lengths = byte_lengths(options.data / "tokenizer.json")
        held_out = read_stream(options.data / "held_out.xz")
        torch.set_float32_matmul_precision("highest")
        with torch.no_grad():
            summary |= bits_per_byte(exported, shape, held_out, lengths, options.held_out_windows)
        log.write(json.dumps(summary) + "\n")
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
