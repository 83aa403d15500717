"""Speculation on the demo model of the DeepSeek-V4 architecture: accepted length, speed, and calibration.

    python benchmarks/speculation.py [--quick] [--json] [--plot DIR] [--only length,speed,calibration]
        [--concurrency 1,4,16,64] [--depths 5,7] [--drafters NAMES] [--ways NAMES] [--log FILE] [--accelerator cpu]
        [--clock wall]

Prompts are of three kinds, from standard-library files that took no part in training: code, prose (docstrings), and
JSON (what the files define, as records). Drafters: DSpark, the same without heads (DFlash), DFlash of five layers, the
MTP block applied again and again, and n-grams; ``mtp-1`` is the MTP block applied once.

* length: tokens a round, the bonus token included, over rounds in which all drafts were verified. All drafters continue
  the same prompts; ratios are of means over prompts, with 95 % intervals by bootstrap over them.
* speed: rounds alternate between the ways to decode; a number is the median of its rounds. Ratios are to the mean of
  two engines without speculation, one opened first and one last. A round at 1 request takes several prompts one after
  the other. ``budget`` is drafts verified for a request in a step.
* calibration: expected calibration error of the survival over other prompts than the shipped scaling was fitted to,
  before and after it, with its standard error over prompts; what it would be if the survival were true (so few drafts
  never come out even); with temperatures alone, and with biases but without margins, those of each half of the prompts
  fitted to the other; how well survival tells drafts apart before and after (area under the curve); and how much more
  often drafts of each kind survive than is said.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import finish, machine, print_table
from deepinfer_spec_decode.calibrate import read_records
from deepinfer_spec_decode.calibration import FILE_NAME, read_scaling
from deepinfer_spec_decode.needs import drafter_path
from deepinfer_spec_decode.reliability import points
from deepinfer_spec_decode.sts import PLAIN, Records, Scaling
from speculation_plots import draw
from speculation_prompts import KINDS, prompts

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import Verified

PAPER = {"DSpark over DFlash": 0.16, "per user over MTP-1": (0.60, 0.85), "ECE after": 0.01}
DRAFTERS: dict[str, tuple[str, str]] = {
    "dspark": ("dspark", "demo-v4-dspark"),
    "dflash": ("dspark", "demo-v4-dflash"),
    "dflash-5": ("dspark", "demo-v4-dflash-5"),
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
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--calibration-prompts", type=int, default=64, help="of each kind; 64 give about 8,000 drafts")
    parser.add_argument("--depths", default="5,7", help="drafts of the accepted lengths")
    parser.add_argument("--drafters", default=",".join((*DRAFTERS, "mtp-1")), help="whose accepted lengths")
    parser.add_argument(
        "--ways", default=",".join(WAYS), help="to decode, of the speed; the first two are compared with"
    )
    parser.add_argument(
        "--log", type=Path, help="file that gets each row as it is measured, a JSON object in each line"
    )
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="of the speed; processor: with one thread, beside other work"
    )
    return parser.parse_args()


def note(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Show a row, and write it down, at once: a run that is cut short has measured something."""
    text = json.dumps(row)
    print(text, flush=True)
    if options.log is not None:
        with options.log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


# ---- engines


def open_llm(
    drafter: str | None,
    depth: int,
    *,
    calibration: str = "auto",
    record: str = "",
    accelerator: str = "cpu",
    **speculation: Any,
) -> LLM:
    """The demo model with a drafter, or alone; ``record``: file of what becomes of its drafts."""
    settings: dict[str, Any] = {
        "kv_cache": {"prefix_cache": False},
        "scheduling": {"max_running": 64},
        "logging": {"progress": False},
    }
    if drafter is not None:
        method, module = DRAFTERS[drafter]
        settings["speculation"] = {"method": method, "max_draft_tokens": depth, **speculation}
        plugin = {"drafter": module, "calibration": calibration, "record_file": record, "cost_cache": "off"}
        settings["plugins"] = {"spec_decode": plugin}
    return LLM("demo-v4", accelerator=accelerator, **settings)


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

COMPARED = (("dspark", "dflash"), ("dspark", "dflash-5"), ("dspark", "mtp"), ("dflash", "mtp"), ("dflash-5", "mtp"))


def measured(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Name, drafter, drafts."""
    wanted = options.drafters.split(",")
    found = [(name, name, int(d)) for d in options.depths.split(",") for name in DRAFTERS if name in wanted]
    return [*found, ("mtp-1", "mtp", 1)] if "mtp-1" in wanted else found


def lengths(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a round by drafter, drafts, temperature and kind, with each prompt's own mean."""
    rows: list[dict[str, Any]] = []
    by_prompt: dict[tuple[Any, ...], list[float]] = {}
    texts = {kind: prompts(kind, options.prompts) for kind in KINDS}
    for name, drafter, depth in measured(options):
        with open_llm(drafter, depth, accelerator=options.accelerator) as llm:
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
                    by_prompt[name, depth, temperature, kind] = means
                    rows.append(
                        {
                            "drafter": name,
                            "drafts": depth,
                            "temperature": temperature,
                            "kind": kind,
                            "tokens_a_round": round(1 + statistics.mean(whole or [0]), 3),
                            "rounds": len(whole),
                            "of_prompts": [round(m, 4) for m in means],
                        }
                    )
                    note(options, rows[-1])
    columns = ("drafter", "drafts", "temperature", "kind", "tokens_a_round", "rounds")
    print("tokens a round")
    print_table(columns, [[row[c] for c in columns] for row in rows])
    depths = [int(d) for d in options.depths.split(",")]
    pairs = [pair for pair in COMPARED if set(pair) <= set(options.drafters.split(","))]
    cases = [(pair, depth, temperature) for pair in pairs for depth in depths for temperature in (0.0, 1.0)]
    compared = [_compare(by_prompt, *case) for case in cases]
    print("ratios, mean over prompts with a 95 % interval")
    columns = ("of", "over", "drafts", "temperature", "ratio", "low", "high")
    print_table(columns, [[c[name] for name in columns] for c in compared])
    return {"rows": rows, "ratios": compared}


def _compare(
    by_prompt: dict[tuple[Any, ...], list[float]], pair: tuple[str, str], depth: int, temperature: float
) -> dict[str, Any]:
    """Ratio of mean lengths over all prompts, with the interval of a bootstrap over prompts."""
    first, second = (
        np.concatenate([by_prompt[drafter, depth, temperature, kind] for kind in KINDS]) for drafter in pair
    )
    picks = np.random.default_rng(0).integers(0, len(first), (4000, len(first)))
    low, high = np.quantile(first[picks].mean(1) / second[picks].mean(1), (0.025, 0.975))
    return {
        "of": pair[0],
        "over": pair[1],
        "drafts": depth,
        "temperature": temperature,
        "ratio": round(float(first.mean() / second.mean()), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
    }


# ---- speed


WAYS: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "none": (None, 0, {}),
    "mtp-1": ("mtp", 1, {"schedule": "fixed"}),
    "mtp confidence": ("mtp", 5, {"schedule": "confidence"}),
    "dspark fixed": ("dspark", 5, {"schedule": "fixed"}),
    "dspark confidence": ("dspark", 5, {"schedule": "confidence"}),
    "dspark-7 fixed": ("dspark", 7, {"schedule": "fixed"}),
    "dspark-7 confidence": ("dspark", 7, {"schedule": "confidence"}),
    "ngram fixed": ("ngram", 5, {"schedule": "fixed"}),
    "ngram confidence": ("ngram", 5, {"schedule": "confidence"}),
    "none again": (None, 0, {}),
}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
ALONE = ("none", "none again")
"""Opened first and last: of two engines that are alike the one opened first was once faster by 7 %."""


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by way and concurrency, greedily."""
    texts = [text for kind in KINDS for text in prompts(kind, options.prompts)]
    random.Random(1).shuffle(texts)
    rows, clock = [], CLOCKS[options.clock]
    ways = {way: WAYS[way] for way in options.ways.split(",")}
    engines = {way: open_llm(d, n, accelerator=options.accelerator, **more) for way, (d, n, more) in ways.items()}
    try:
        for concurrency in map(int, options.concurrency.split(",")):
            repeated = texts * -(-concurrency // len(texts))
            batches = [repeated[i : i + concurrency] for i in range(0, len(repeated), concurrency)]
            batches = [batch for batch in batches if len(batch) == concurrency]
            wanted = params(0.0, options.tokens, concurrency, True)
            times: dict[str, list[float]] = {way: [] for way in engines}
            budgets: dict[str, list[float]] = {way: [] for way in engines}
            for llm in engines.values():
                llm.generate(batches[0], wanted)
            for _ in range(options.rounds):
                for way, llm in engines.items():
                    planner = llm.engine.core.planner
                    before = (planner.drafting.verified_budget, planner.steps) if planner.drafting else (0, 0)
                    started = clock()
                    for batch in batches:
                        llm.generate(batch, wanted)
                    times[way].append((clock() - started) / len(batches))
                    note(options, {"way": way, "concurrency": concurrency, "seconds": round(times[way][-1], 3)})
                    if planner.drafting:
                        steps = planner.steps - before[1]
                        verified = planner.drafting.verified_budget - before[0]
                        budgets[way].append(verified / max(steps, 1) / concurrency)
            found = _speed_rows(concurrency, times, budgets, options.tokens)
            for row in found:
                note(options, row)
            rows += found
    finally:
        for llm in engines.values():
            llm.close()
    columns = ("way", "concurrency", "tokens_per_s", "per_user", "over_none", "low", "high", "over_mtp_1", "budget")
    print("speed")
    print_table(columns, [[row[c] for c in columns] for row in rows])
    return {"rows": rows}


def _speed_rows(
    concurrency: int, times: dict[str, list[float]], budgets: dict[str, list[float]], tokens: int
) -> list[dict[str, Any]]:
    """``low`` and ``high``: of the ratio to the same round without speculation, on average over its engines."""
    alone = [statistics.mean(round) for round in zip(*(t for w, t in times.items() if w in ALONE), strict=True)]
    plain = statistics.median(alone)
    rows = []
    for way, found in times.items():
        middle = statistics.median(found)
        ratios = [p / t for p, t in zip(alone, found, strict=True)]
        rows.append(
            {
                "way": way,
                "concurrency": concurrency,
                "tokens_per_s": round(concurrency * tokens / middle, 1),
                "per_user": round(tokens / middle, 1),
                "over_none": round(plain / middle, 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
                "over_mtp_1": round(statistics.median(times["mtp-1"]) / middle, 3) if "mtp-1" in times else None,
                "budget": round(statistics.mean(budgets[way] or [0.0]), 2),
            }
        )
    return rows


# ---- calibration


MODES = {"exact": ("exact", 1.0), "rejection": ("rejection", 1.0), "greedy": ("exact", 0.0)}
"""Verification and temperature."""


def calibration(options: argparse.Namespace) -> dict[str, Any]:
    """Calibration error of DSpark's survival before and after the shipped scaling, by mode."""
    count = options.calibration_prompts
    path = Path(drafter_path(DRAFTERS["dspark"][1]) or "") / FILE_NAME
    texts = {kind: prompts(kind, 2 * count, seed=11)[count:] for kind in KINDS}
    found = {}
    for mode, kinds in records_of(texts, options).items():
        records = joined(list(kinds.values()))
        scaling = read_scaling(path, "dspark", mode) or PLAIN
        before, after = records.survival(PLAIN), records.survival(scaling)
        found[mode] = {
            "drafts": len(records.accepted),
            "tokens_a_round": round(1 + float(records.accepted.mean()), 3),
            "before": round(records.error(before), 4),
            "after": round(records.error(after), 4),
            "standard_error": round(records.standard_error(after), 4),
            "least": round(records.least_error(after), 4),
            "temperatures_alone": round(records.error(records.crossed(bias=False)), 4),
            "no_margins": round(records.error(records.crossed(bias=True)), 4),
            "told_apart": [round(told_apart(*records.pairs(said)), 3) for said in (before, after)],
            "more_than_said": {kind: round(more_than_said(of, scaling), 4) for kind, of in kinds.items()},
            "points": {name: points(records, said) for name, said in (("before", before), ("after", after))},
        }
    columns = [name for name in next(iter(found.values())) if name != "points"]
    print("calibration of DSpark's survival")
    print_table(("mode", *columns), [[mode, *(r[c] for c in columns)] for mode, r in found.items()])
    return found


def records_of(texts: dict[str, list[str]], options: argparse.Namespace) -> dict[str, dict[str, Records]]:
    """What became of drafts after these prompts, by mode and kind, with confidences as the module says them.

    One engine has all modes: rejection judges the requests that have no seed.
    """
    found: dict[str, dict[str, Records]] = {}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "drafts.jsonl"
        more = {"calibration": "off", "record": str(file), "accelerator": options.accelerator}
        with open_llm("dspark", 5, verify="rejection", **more) as llm:
            for mode, (rule, temperature) in MODES.items():
                found[mode] = {}
                for kind, some in texts.items():
                    llm.generate(some, params(temperature, options.tokens, len(some), rule == "exact"))
                    found[mode][kind] = read_records(file, rule)
                    file.unlink()
    return found


def joined(parts: list[Records]) -> Records:
    """Of different prompts."""
    first = np.cumsum([0] + [int(part.prompts.max()) + 1 for part in parts])
    return Records(
        logits=np.concatenate([part.logits for part in parts]),
        accepted=np.concatenate([part.accepted for part in parts]),
        prompts=np.concatenate([part.prompts + start for part, start in zip(parts, first, strict=False)]),
        margins=np.concatenate([part.margins for part in parts if part.margins is not None]),
    )


def told_apart(said: Any, came: Any) -> float:
    """Chance that more was said of a draft that survived than of one that did not (area under the curve)."""
    ranks = np.empty(len(said))
    ranks[np.argsort(said)] = np.arange(len(said))
    yes = int(came.sum())
    return float((ranks[came].sum() - yes * (yes - 1) / 2) / (yes * (len(said) - yes)))


def more_than_said(records: Records, scaling: Scaling) -> float:
    """How much oftener drafts survived than was said, on average."""
    said, came = records.pairs(records.survival(scaling))
    return float(came.mean() - said.mean())


def main() -> None:
    """Measure what was asked for."""
    options = arguments()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 3, 24, 1
        options.concurrency, options.calibration_prompts = "1,4", 3
    results: dict[str, Any] = {"machine": machine(), "paper": PAPER}
    parts = {"length": lengths, "speed": speed, "calibration": calibration}
    for name in options.only.split(","):
        results[name] = parts[name](options)
    if options.plot is not None:
        draw(options.plot, results)
    finish(results, options.json)


if __name__ == "__main__":
    main()
