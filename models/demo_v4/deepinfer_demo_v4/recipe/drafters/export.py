"""Trained modules as checkpoints with released names, and how they did on held-out text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deepinfer_demo_v4.recipe import checkpoint

from .modules import NOISE
from .trained import Trained


def write(module: Trained, config: Mapping[str, Any], taps: list[int], out: Path) -> None:
    """config.json and the tensors that the target's checkpoint does not have."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in checkpoint.released(module.learned).items():
        dtype = torch.float32 if checkpoint.kept_wide(name) else torch.bfloat16
        stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    fields = {**config, "compress_ratios": [*ratios, *[0] * module.kind.stages]}
    if module.kind.family != "mtp":
        fields |= {
            "dspark_block_size": module.data.gamma,
            "dspark_noise_token_id": NOISE,
            "dspark_target_layer_ids": taps,
            "dspark_markov_rank": module.kind.rank,
        }
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def export(
    modules: Mapping[str, Trained],
    config: Mapping[str, Any],
    step: int,
    o: argparse.Namespace,
    course: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write all, evaluate all; what was found. ``course``: tokens a round by step, to which this adds."""
    taps = list(map(int, o.taps.split(",")))
    for name, module in modules.items():
        write(module, config, taps, o.out / f"demo-v4-{name}")
    results = {name: module.evaluate() for name, module in modules.items()}
    course.append({"step": step} | {name: _short(r) for name, r in results.items()})
    earlier = json.loads((o.resume / "evaluation.json").read_text(encoding="utf-8")) if o.resume else {}
    summary = {
        "steps": step,
        "steps_before": earlier.get("steps", 0) + earlier.get("steps_before", 0),
        "texts": o.texts,
        "length": o.length,
        "gamma": o.gamma,
        "objective": o.objective,
        "blocks_a_step": o.batch * o.anchors,
        "results": results,
        "course": course,
    }
    (o.out / "evaluation.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _short(found: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Tokens a round of a module: sampled, greedy, and sampled as in use where that was asked."""
    drawn = found["sampled"].get("tokens_a_drawn_round")
    return [found[t]["tokens_a_round"] for t in ("sampled", "greedy")] + ([] if drawn is None else [drawn])
