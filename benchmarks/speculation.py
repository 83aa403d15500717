"""Speculation on the demo model of the DeepSeek-V4 architecture: accepted length, speed, and calibration.

    python benchmarks/speculation.py [--quick] [--json] [--plot DIR] [--only length,speed,calibration]

Prompts are of three kinds, from standard-library files that took no part in training: code, prose (docstrings), and
JSON (what the files define, as records). Drafters: DSpark, the same without heads (DFlash), the MTP block applied again
and again, and n-grams; ``mtp-1`` is the MTP block applied once.

* length: tokens a round, the bonus token included, over rounds in which all drafts were verified; the difference of
  DSpark and DFlash has a 95 % interval by bootstrap over the prompts, which both continue.
* speed: rounds alternate between the ways to decode; a number is the median of its rounds. ``budget`` is drafts
  verified for a request in a step.
* calibration: expected calibration error of the survival, on drafts that were not fitted to, for both rules.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, machine, print_table
from deepinfer_demo_v4.held_out import held_out_texts
from deepinfer_spec_decode.sts import Records, fit

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import Verified

KINDS = ("code", "prose", "json")
PAPER = {"DSpark over DFlash": 0.16, "per user over MTP-1": (0.60, 0.85), "ECE after": 0.01}
DRAFTERS: dict[str, tuple[str, str]] = {
    "dspark": ("dspark", "demo-v4-dspark"),
    "dflash": ("dspark", "demo-v4-dflash"),
    "mtp": ("mtp", "demo-v4-mtp"),
    "ngram": ("ngram", ""),
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts and rounds, to see that it runs")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--plot", type=Path, help="directory for plots")
    parser.add_argument("--only", default="length,speed,calibration")
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="generated for a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


# ---- prompts


def prompts(kind: str, count: int, seed: int = 0) -> list[str]:
    """Beginnings of held-out text of one kind, about 300 characters each."""
    rng, texts = random.Random(seed), held_out_texts()
    found = list(dict.fromkeys(text for name in sorted(texts) for text in _of_kind(kind, texts[name])))
    rng.shuffle(found)
    if len(found) < count:
        raise SystemExit(f"{len(found)} held-out prompts of kind {kind!r}, {count} wanted: lower --prompts")
    return found[:count]


def _of_kind(kind: str, text: str) -> Iterator[str]:
    tree = ast.parse(text)
    definitions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    if kind == "code":
        lines = text.splitlines(keepends=True)
        for node in definitions:
            part = "".join(lines[node.lineno - 1 : node.lineno + 9])[:300]
            if len(part) > 150:
                yield part
    elif kind == "prose":
        for node in [tree, *definitions]:
            said = ast.get_docstring(node) or ""
            if len(said) > 200:
                yield said[:300]
    else:
        records = [
            {"name": n.name, "line": n.lineno, "arguments": [a.arg for a in n.args.args]}
            for n in definitions
            if isinstance(n, ast.FunctionDef)
        ]
        for start in range(0, len(records) - 6, 6):
            yield json.dumps(records[start : start + 6], indent=1)[:300]


# ---- engines


def open_llm(drafter: str | None, depth: int, *, calibration: str = "auto", **speculation: Any) -> LLM:
    """The demo model with a drafter, or alone."""
    settings: dict[str, Any] = {
        "kv_cache": {"prefix_cache": False},
        "scheduling": {"max_running": 64},
        "logging": {"progress": False},
    }
    if drafter is not None:
        method, module = DRAFTERS[drafter]
        settings["speculation"] = {"method": method, "max_draft_tokens": depth, **speculation}
        settings["plugins"] = {"spec_decode": {"drafter": module, "calibration": calibration, "cost_cache": "off"}}
    return LLM("demo-v4", accelerator="cpu", **settings)


def heard(llm: LLM) -> list[Verified]:
    """Verdicts from now on."""
    drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
    verdicts: list[Verified] = []
    inner = drafter.verified

    def verified(results: Any) -> None:
        verdicts.extend(results)
        inner(results)

    drafter.verified = verified
    return verdicts


def params(temperature: float, tokens: int, count: int, seeded: bool) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, max_tokens=tokens, seed=i if seeded else None, ignore_eos=True)
        for i in range(count)
    ]


# ---- accepted length


def lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a round by drafter, drafts, temperature and kind, with each prompt's own mean."""
    rows: list[dict[str, Any]] = []
    by_prompt: dict[tuple[Any, ...], list[float]] = {}
    texts = {kind: prompts(kind, options.prompts) for kind in KINDS}
    for depth in (5, 7):
        for drafter in DRAFTERS:
            with open_llm(drafter, depth) as llm:
                verdicts = heard(llm)
                for temperature in (0.0, 1.0):
                    for kind in KINDS:
                        verdicts.clear()
                        outputs = llm.generate(texts[kind], params(temperature, options.tokens, options.prompts, False))
                        means = []
                        for output in outputs:
                            mine = [v for v in verdicts if v.request_id == output.request_id and v.proposed == depth]
                            means.append(1 + statistics.mean([v.accepted for v in mine] or [0]))
                        whole = [v.accepted for v in verdicts if v.proposed == depth]
                        by_prompt[drafter, depth, temperature, kind] = means
                        rows.append(
                            {
                                "drafter": drafter,
                                "drafts": depth,
                                "temperature": temperature,
                                "kind": kind,
                                "tokens_a_round": round(1 + statistics.mean(whole or [0]), 3),
                                "rounds": len(whole),
                            }
                        )
    columns = ("drafter", "drafts", "temperature", "kind", "tokens_a_round", "rounds")
    print("tokens a round")
    print_table(columns, [[row[c] for c in columns] for row in rows])
    compared = [_compare(by_prompt, depth, temperature) for depth in (5, 7) for temperature in (0.0, 1.0)]
    print("DSpark over DFlash, mean over prompts with a 95 % interval, and over MTP")
    print_table(
        ("drafts", "temperature", "ratio", "low", "high", "over mtp"),
        [[c["drafts"], c["temperature"], c["ratio"], c["low"], c["high"], c["over_mtp"]] for c in compared],
    )
    return {"rows": rows, "dspark_over_dflash": compared}


def _compare(by_prompt: dict[tuple[Any, ...], list[float]], depth: int, temperature: float) -> dict[str, Any]:
    """Ratio of mean lengths over all prompts, with the interval of a bootstrap over prompts."""

    def every(drafter: str) -> np.ndarray[Any, Any]:
        return np.concatenate([by_prompt[drafter, depth, temperature, kind] for kind in KINDS])

    dspark, dflash, mtp = every("dspark"), every("dflash"), every("mtp")
    picks = np.random.default_rng(0).integers(0, len(dspark), (4000, len(dspark)))
    ratios = dspark[picks].mean(1) / dflash[picks].mean(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return {
        "drafts": depth,
        "temperature": temperature,
        "ratio": round(float(dspark.mean() / dflash.mean()), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "over_mtp": round(float(dspark.mean() / mtp.mean()), 3),
    }


# ---- speed


WAYS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "none": (None, 0, {}),
    "mtp-1": ("mtp", 1, {"schedule": "fixed"}),
    "dspark fixed": ("dspark", 5, {"schedule": "fixed"}),
    "dspark confidence": ("dspark", 5, {"schedule": "confidence"}),
    "mtp confidence": ("mtp", 5, {"schedule": "confidence"}),
    "ngram confidence": ("ngram", 5, {"schedule": "confidence"}),
}


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by way and concurrency."""
    texts = [text for kind in KINDS for text in prompts(kind, options.prompts)]
    random.Random(1).shuffle(texts)
    rows = []
    engines = {way: open_llm(*WAYS[way][:2], **WAYS[way][2]) for way in WAYS}
    try:
        for concurrency in (1, 4) if options.quick else (1, 4, 16, 64):
            batch = (texts * (1 + concurrency // len(texts)))[:concurrency]
            wanted = params(0.0, options.tokens, concurrency, True)
            times: dict[str, list[float]] = {way: [] for way in engines}
            budgets: dict[str, float] = {}
            for llm in engines.values():
                llm.generate(batch, wanted)
            for _ in range(options.rounds):
                for way, llm in engines.items():
                    drafting = llm.engine.core.planner.drafting
                    before = (drafting.verified_budget, llm.engine.core.planner.steps) if drafting else (0, 0)
                    started = time.perf_counter()
                    llm.generate(batch, wanted)
                    times[way].append(time.perf_counter() - started)
                    if drafting:
                        steps = llm.engine.core.planner.steps - before[1]
                        budgets[way] = (drafting.verified_budget - before[0]) / max(steps, 1) / concurrency
            plain = statistics.median(times["none"])
            for way, found in times.items():
                middle = statistics.median(found)
                rows.append(
                    {
                        "way": way,
                        "concurrency": concurrency,
                        "tokens_per_s": round(concurrency * options.tokens / middle, 1),
                        "per_user": round(options.tokens / middle, 1),
                        "over_none": round(plain / middle, 3),
                        "over_mtp_1": round(statistics.median(times["mtp-1"]) / middle, 3),
                        "budget": round(budgets.get(way, 0.0), 2),
                    }
                )
    finally:
        for llm in engines.values():
            llm.close()
    columns = ("way", "concurrency", "tokens_per_s", "per_user", "over_none", "over_mtp_1", "budget")
    print("speed")
    print_table(columns, [[row[c] for c in columns] for row in rows])
    return {"rows": rows}


# ---- calibration


def calibration(options: argparse.Namespace) -> dict[str, Any]:
    """Calibration error of DSpark's survival before and after temperatures, by rule."""
    texts = [text for kind in KINDS for text in prompts(kind, options.prompts, seed=3)]
    found = {}
    for rule in ("exact", "rejection"):
        with open_llm("dspark", 5, verify=rule, calibration="off") as llm:
            verdicts = heard(llm)
            llm.generate(texts, params(1.0, options.tokens, len(texts), rule == "exact"))
        mine = [v for v in verdicts if v.confidence is not None and v.rule == rule]
        records = Records.of([list(v.confidence or ()) for v in mine], [v.accepted for v in mine])
        half = np.arange(len(mine)) % 2 == 0
        temperatures = fit(records.part(half))
        check = records.part(~half)
        found[rule] = {
            "drafts": len(mine),
            "tokens_a_round": round(1 + float(records.accepted.mean()), 3),
            "error_before": round(check.error((1.0,)), 4),
            "error_after": round(check.error(temperatures), 4),
            "temperatures": [round(t, 3) for t in temperatures],
        }
    columns = ("drafts", "tokens_a_round", "error_before", "error_after")
    print("calibration of DSpark's survival")
    print_table(("rule", *columns), [[rule, *(r[c] for c in columns)] for rule, r in found.items()])
    return found


def plot(directory: Path, results: dict[str, Any]) -> None:
    """Speed over no speculation and verified drafts against concurrency."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    if "speed" not in results:
        return
    rows = results["speed"]["rows"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        left.plot([r["concurrency"] for r in mine], [r["over_none"] for r in mine], marker="o", label=way)
        if way != "none":
            right.plot([r["concurrency"] for r in mine], [r["budget"] for r in mine], marker="o", label=way)
    left.set(xscale="log", xlabel="requests at once", ylabel="tokens/s over no speculation")
    right.set(xscale="log", xlabel="requests at once", ylabel="drafts verified for a request in a step")
    left.legend()
    figure.savefig(directory / "speculation.png")


def main() -> None:
    """Measure what was asked for."""
    options = arguments()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 3, 24, 1
    results: dict[str, Any] = {"machine": machine(), "paper": PAPER}
    parts = {"length": lengths, "speed": speed, "calibration": calibration}
    for name in options.only.split(","):
        results[name] = parts[name](options)
    if options.plot is not None:
        plot(options.plot, results)
    finish(results, options.json)


if __name__ == "__main__":
    main()
