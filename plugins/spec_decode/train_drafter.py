"""Train draft modules for the demo model of the DeepSeek-V4 architecture, on text that it wrote itself.

    export PYTHONPATH=models/demo_v4
    python -m deepinfer_demo_v4.recipe.drafters.prompts --docs DIR --out prompts.npz
    python plugins/spec_decode/train_drafter.py --prompts prompts.npz --out DIR --until 450

The target continues the prompts, half at temperature 1, a quarter at 0.5 and a quarter greedily, and is frozen. Then
all modules are trained together: in each step each gets as many rows of the same text, so that their budgets are
equal. The rate falls with the time that is left.

* ``dspark``: Markov head, confidence head (arXiv:2607.05147); ``dspark-2`` with two stages;
* ``dflash``, ``dflash-2``: the same without the two heads;
* ``mtp``: the next-token module, trained as such.

Written, now and then and at the end, are checkpoints with released names that lack what the target's has, and
``evaluation.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.drafters.export import export
from deepinfer_demo_v4.recipe.drafters.modules import PROGRAMS, Kind
from deepinfer_demo_v4.recipe.drafters.target_text import Text, write_text
from deepinfer_demo_v4.recipe.drafters.trained import LOSSES, Data, start
from deepinfer_demo_v4.recipe.shape import Shape

START = time.perf_counter()
WARM_STEPS = 100


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="what deepinfer_demo_v4.recipe.drafters.prompts wrote"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--modules", default="dspark,dflash,mtp,dspark-2,dflash-2")
    parser.add_argument("--until", type=float, default=450.0, help="seconds from the start of the program")
    parser.add_argument("--texts", type=int, default=49152, help="sequences of the target's to train on")
    parser.add_argument("--part", type=int, default=16384, help="sequences written at once")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--taps", default="1,3,4,5", help="layers of the target that a block drafter reads")
    parser.add_argument("--gamma", type=int, default=7, help="rows of a block")
    parser.add_argument("--rank", type=int, default=128, help="of the Markov head")
    parser.add_argument("--batch", type=int, default=256, help="sequences of a step")
    parser.add_argument("--anchors", type=int, default=12, help="blocks of each sequence of a step")
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--sinkhorn", type=int, default=8, help="rounds while training; they have converged by then")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--compile", default="inductor", help="backend of torch.compile, or no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def texts(o: argparse.Namespace, target: dict[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> dict[str, Text]:
    """Both sets, written by the target."""
    taps, device = tuple(map(int, o.taps.split(","))), torch.device(o.device)
    found = {}

    def eager(function: Any) -> Any:
        return function

    def compiled(function: Any) -> Any:
        return function if o.compile == "no" else torch.compile(function, backend=o.compile, dynamic=False)

    with np.load(o.prompts) as prompts:
        for name in ("train", "held_out"):
            rows = torch.from_numpy(prompts[name][: o.texts].astype(np.int64)).to(device)
            parts = rows.split(o.part)
            text = None
            for i, part in enumerate(parts):
                run = compiled if name == "train" else eager  # the other set is not worth the compiler's time
                written = write_text(target, part, o.length, taps, shape, dtype, o.seed + i, run)
                if text is None:
                    text = Text.room(written, len(rows))
                text.put(written, i * o.part)
                del written
                say(f"{name}: {i + 1} of {len(parts)} parts of {len(part)} sequences")
            assert text is not None
            found[name] = text
    return found


@torch._dynamo.config.patch(cache_size_limit=64)
def main() -> None:
    """Write, train, evaluate."""
    o = arguments()
    torch.manual_seed(o.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(o.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    shape = Shape.read(config)
    target = {name: tensor.to(device) for name, tensor in checkpoint.load(CHECKPOINT).items()}
    o.out.mkdir(parents=True, exist_ok=True)
    text = texts(o, target, shape, dtype)
    data = Data.of(text["train"], text["held_out"], target, shape, o)
    programs = dict(PROGRAMS) | LOSSES
    if o.compile != "no":
        programs = {n: torch.compile(f, backend=o.compile, dynamic=False) for n, f in programs.items()}
    modules = {name: start(Kind.of(name, o.rank), target, data, shape, programs, o) for name in o.modules.split(",")}
    generator = torch.Generator(device).manual_seed(o.seed + 3)
    for name, module in modules.items():
        module.loss(data.draw(generator)).backward()
        module.optimiser.step(0.0)
        say(f"{name}: first step")
    began = written = time.perf_counter()
    length = o.until - (began - START)
    step = 0
    while (done := (time.perf_counter() - began) / length) < 1:
        share = min(1.0, (step + 1) / WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * done))
        drawn = data.draw(generator)
        losses = {}
        for name, module in modules.items():
            loss = module.loss(drawn)
            loss.backward()
            module.optimiser.step(share)
            losses[name] = loss.detach()
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # or the clock would run ahead of the steps
        if step in (10, 100) or step % 500 == 0:
            shown = ", ".join(f"{name} {float(loss):.4f}" for name, loss in losses.items())
            say(f"step {step}, {(time.perf_counter() - began) / step * 1000:.1f} ms each: {shown}")
        if time.perf_counter() - written > o.every:
            export(modules, config, step, o)
            written = time.perf_counter()
            say(f"written at step {step}")
    results = export(modules, config, step, o)
    say(f"{step} steps")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
