"""Draws the GPU's results: ``python benchmarks/gpu_plots.py`` (needs matplotlib).

Reads ``benchmarks/results/h200/*.json`` and writes ``gpu-engine.svg`` and ``gpu-operators.svg`` into ``docs/images``.
Of the engine's runs, in the order in which they were made, the last with an entry counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
BATCHES = (1, 8, 64, 256)
STAGES = (
    "before tuning",
    "tiles as measured",
    "regions",
    "tensor descriptors",
    "norms at ends",
    "list of work",
    "attention by tokens",
)
"""Runs of the engine that the line of progress goes through; the fourth with descriptors for few rows too."""
WITHOUT = {"tensor descriptors": ("decode 1", "decode 8")}
"""What a run measured of tiles that are not in use."""
INK, PALE, SECOND = "#1f5a99", "#c9d6e4", "#d1743c"
WEIGHTS = {"qkv": "6144 × 2560", "attention_out": "2560 × 4096", "gate_up": "19456 × 2560", "down": "2560 × 9728"}


def runs() -> dict[str, Mapping[str, Any]]:
    """Name of a run of the engine -> its entries, in order."""
    found = json.loads((RESULTS / "engine.json").read_text(encoding="utf-8"))
    return {name: entries for name, entries in found.items() if name != "about"}


def entries(name: str) -> Mapping[str, Any]:
    """Results of a run, with or without a line about it beside them."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    inner: Mapping[str, Any] = found.get("entries", found)
    return inner


def latest(key: str) -> Mapping[str, Any]:
    """The entry of the last run that has it, with what is in use."""
    used = {name: run for name, run in runs().items() if key in run and key not in WITHOUT.get(name, ())}
    found: Mapping[str, Any] = list(used.values())[-1][key]
    return found


def steps(axes: Any) -> None:
    """Milliseconds of a decode step, over its floor."""
    decodes = [latest(f"decode {batch}") for batch in BATCHES]
    axes.bar(range(len(BATCHES)), [d["ms"] for d in decodes], color=PALE, label="measured")
    axes.bar(range(len(BATCHES)), [d["floor_ms"] for d in decodes], color=INK, label="floor: bytes over bandwidth")
    for place, found in enumerate(decodes):
        axes.text(place, found["ms"], f"{found['of_floor']:.0%}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.set(xlabel="requests", ylabel="ms a step", title="Decode, Qwen3-4B shape, bf16")
    axes.legend(frameon=False, fontsize=8)


def progress(axes: Any) -> None:
    """Share of the floor, from change to change; the floor of a run without one is that of the last."""
    names = [name for name in STAGES if name in runs()]
    for batch, color in ((1, INK), (64, SECOND)):
        key = f"decode {batch}"
        shares = [runs()[n][key].get("of_floor", latest(key)["floor_ms"] / runs()[n][key]["ms"]) for n in names]
        axes.plot(range(len(names)), shares, marker="o", color=color, label=f"{batch} requests")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=7)
    axes.set(ylim=(0.4, 1.0), title="Share of the floor, change by change")
    axes.legend(frameon=False, fontsize=8)


def attention(axes: Any) -> None:
    """Share of the copy bandwidth, over the bytes read."""
    found = {key: e for key, e in entries("attention.json").items() if key.startswith("decode ") and "sdpa_us" in e}
    tokens = {key: cached_tokens(key.removeprefix("decode ")) for key in found}
    megabytes = {key: 2 * 2 * 8 * 128 * count / 1e6 for key, count in tokens.items()}
    order = sorted(found, key=megabytes.__getitem__)
    for field, color, label in (("us", INK, "this package"), ("sdpa_us", SECOND, "torch, keys in one piece")):
        shares = [found[key]["floor_us"] / found[key][field] for key in order]
        axes.plot([megabytes[key] for key in order], shares, marker="o", color=color, label=label)
    axes.set_xscale("log")
    axes.set(xlabel="MB of keys and values", ylim=(0, 1.15), title="Decode attention: share of copy bandwidth")
    axes.legend(frameon=False, fontsize=8)


def cached_tokens(text: str) -> int:
    """``"8x1024"`` -> 8192."""
    batch, _, context = text.partition("x")
    return int(batch) * int(context)


def linear(axes: Any) -> None:
    """Microseconds over the time of reading the weight, by number of rows."""
    found = entries("linear.json")
    for (name, label), color in zip(WEIGHTS.items(), (INK, SECOND, "#5b8c3e", "#8a5aa8"), strict=True):
        rows = sorted(e["rows"] for key, e in found.items() if key.startswith(f"linear {name} ") and e["rows"] <= 64)
        out, inner = (int(size) for size in label.split(" × "))
        floor = 2 * out * inner / 4.28e6
        for field, style in (("us", "-"), ("cublas_us", ":")):
            times = [found[f"linear {name} {count}"][field] / floor for count in rows]
            axes.plot(rows, times, style, color=color, label=label if style == "-" else None)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    axes.set(xlabel="rows", ylabel="of the weight's reading", ylim=(1.0, 2.6), title="Linear layers; dotted: cuBLAS")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "deepinfer"  # equal results give equal files
    from matplotlib.figure import Figure

    IMAGES.mkdir(exist_ok=True)
    for name, drawings in (("gpu-engine", (steps, progress)), ("gpu-operators", (attention, linear))):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, draw in zip(figure.subplots(1, 2), drawings, strict=True):
            draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
