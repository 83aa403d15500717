"""Train draft modules for the demo model of the DeepSeek-V4 architecture, on text that it wrote itself.

    export PYTHONPATH=models/demo_v4
    python -m deepinfer_demo_v4.recipe.drafters.prompts --docs DIR --out prompts.npz
    python plugins/spec_decode/train_drafter.py --prompts prompts.npz --out DIR --until 520

The target continues the prompts, half at temperature 1, an eighth at 0.5 and the rest greedily, and is frozen. Then
all modules are trained together: in each step each gets as many rows of the same text, so that their budgets are
equal. The rate falls with the time that is left.

* ``dspark-3``: Markov head, confidence head (arXiv:2607.05147), three stages; ``dspark-2`` and ``dspark`` have fewer;
* ``dflash-3``, ...: the same without the two heads;
* ``mtp``: the next-token module, trained as such.

Written, now and then and at the end, are checkpoints with released names that lack what the target's has, and
``evaluation.json``. ``--resume`` begins with such checkpoints, perhaps of fewer stages; moments of the optimisers are
not kept.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.drafters.export import export
from deepinfer_demo_v4.recipe.drafters.modules import PROGRAMS, Kind
from deepinfer_demo_v4.recipe.drafters.steps import Steps
from deepinfer_demo_v4.recipe.drafters.target_text import Text, write_text
from deepinfer_demo_v4.recipe.drafters.trained import LOSSES, Data, Trained, start
from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.shape import Shape

START = time.perf_counter()
WARM_STEPS = 200


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="what deepinfer_demo_v4.recipe.drafters.prompts wrote"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="directory of an earlier --out with the same modules")
    parser.add_argument("--modules", default="dspark-3,dflash-3,mtp")
    parser.add_argument("--until", type=float, default=520.0, help="seconds from the start of the program")
    parser.add_argument("--texts", type=int, default=73728, help="sequences of the target's to train on")
    parser.add_argument("--held-out", type=int, default=1024, help="sequences to evaluate on")
    parser.add_argument("--part", type=int, default=18688, help="sequences written at once")
    parser.add_argument("--eager-text", action="store_true", help="write it without compiling, which takes a minute")
    parser.add_argument("--length", type=int, default=192, help="tokens of a sequence")
    parser.add_argument("--first", type=int, default=48, help="position from which on anchors are drawn")
    parser.add_argument("--taps", default="1,3,4,5", help="layers of the target that a block drafter reads")
    parser.add_argument("--gamma", type=int, default=7, help="rows of a block")
    parser.add_argument(
        "--objective",
        choices=("distance", "length"),
        default="distance",
        help="of block drafters: the paper's distance at every position, or the tokens of a round",
    )
    parser.add_argument("--rank", type=int, default=128, help="of the Markov head")
    parser.add_argument("--batch", type=int, default=192, help="sequences of a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks of each sequence of a step")
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--sinkhorn", type=int, default=8, help="rounds while training; they have converged by then")
    parser.add_argument("--every", type=float, default=90.0, help="seconds between checkpoints")
    parser.add_argument("--compile", default="inductor", help="backend of torch.compile, or no")
    parser.add_argument(
        "--capture",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="a step as one CUDA graph",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="compile for one step, for the compiler's cache, and end"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def rehearsals(o: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Processes that fill the compiler's cache while the target still writes."""
    if o.compile == "no" or o.device == "cpu":
        return []
    names = o.modules.split(",")
    groups = [[n for n in names if (n == "mtp") == alone] for alone in (True, False)]
    command = [sys.executable, *sys.argv, "--rehearse", "--modules"]
    return [subprocess.Popen([*command, ",".join(group)]) for group in groups if group]


def beginnings(o: argparse.Namespace) -> torch.Tensor:
    """``[texts + held_out, P]`` int64; prompts that are used again meet another temperature."""
    with np.load(o.prompts) as prompts:
        train, held = prompts["train"], prompts["held_out"][: o.held_out]
    each = np.arange(o.texts)
    train = train[(each + each // len(train)) % len(train)]
    return torch.from_numpy(np.concatenate((train, held)).astype(np.int64)).to(o.device)


def texts(o: argparse.Namespace, target: Weights, shape: Shape, dtype: torch.dtype) -> tuple[Text, Text]:
    """To train on, and to evaluate on; written by the target."""
    taps, rows = tuple(map(int, o.taps.split(","))), beginnings(o)

    def run(function: Any) -> Any:
        eager = o.compile == "no" or o.eager_text
        return function if eager else torch.compile(function, backend=o.compile, dynamic=False)

    text = None
    for i, part in enumerate(rows.split(o.part)):
        written = write_text(target, part, o.length, taps, shape, dtype, o.seed + i, run)
        if text is None:
            text = Text.room(written, len(rows))
        text.put(written, i * o.part)
        del written
        say(f"{min((i + 1) * o.part, len(rows))} of {len(rows)} sequences")
    assert text is not None
    return text.rows(slice(o.texts)), text.rows(slice(o.texts, len(rows)))


def train(modules: dict[str, Trained], steps: Steps, config: dict[str, Any], o: argparse.Namespace) -> dict[str, Any]:
    """Steps until the time is up; what :func:`export` gave at the end."""
    began = written = time.perf_counter()
    length = o.until - (began - START)
    if length <= 0:
        raise SystemExit(f"--until {o.until:g}: {began - START:.0f} s went by before the first step, give more")
    step, course = 0, list[dict[str, Any]]()
    while (done := (time.perf_counter() - began) / length) < 1:
        steps.step(min(1.0, (step + 1) / WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * done)))
        step += 1
        if step % 10 == 0 and o.device != "cpu":
            torch.cuda.synchronize()  # or the clock would run ahead of the steps
        if step in (10, 100) or step % 500 == 0:
            shown = ", ".join(f"{name} {float(loss):.4f}" for name, loss in steps.losses.items())
            say(f"step {step}, {(time.perf_counter() - began) / step * 1000:.1f} ms each: {shown}")
            if not all(math.isfinite(loss) for loss in steps.losses.values()):
                raise SystemExit(f"a loss is not finite at step {step}: lower --matrix-rate or --rate")
        if time.perf_counter() - written > o.every:
            export(modules, config, step, o, course)
            written = time.perf_counter()
            say(f"written: {json.dumps(course[-1])}")
    return export(modules, config, step, o, course)


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
    ahead = [] if o.rehearse else rehearsals(o)
    if o.rehearse:
        noise = Text.noise(o.batch, o.length, len(o.taps.split(",")), shape, dtype, device)
        data = Data.of(noise, noise, target, shape, o)
    else:
        data = Data.of(*texts(o, target, shape, dtype), target, shape, o)
    for process in ahead:
        process.wait()
    say("texts and programs")
    programs = dict(PROGRAMS) | LOSSES
    if o.compile != "no":
        programs = {n: torch.compile(f, backend=o.compile, dynamic=False) for n, f in programs.items()}
    modules = {}
    for name in o.modules.split(","):
        earlier = o.resume / f"demo-v4-{name}" if o.resume else None
        modules[name] = start(Kind.of(name, o.rank), target, data, shape, programs, o, earlier)
    steps = Steps(modules, data, torch.Generator(device).manual_seed(o.seed + 3))
    steps.prepare(say, capture=o.capture and not o.rehearse)
    if not o.rehearse:
        results = train(modules, steps, config, o)
        say(f"{results['steps']} steps")
        print(json.dumps(results))


if __name__ == "__main__":
    main()
