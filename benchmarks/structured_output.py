"""Structured output: masks, compilation, throughput beside unconstrained text, and tokens that need no step.

    python benchmarks/structured_output.py [--quick] [--json] [--only masks,compile,throughput,wide,jump] [--threads N]

Masks: one row for each request, over a synthetic byte-level vocabulary of 129,280 tokens, in the middle of a nested
JSON document; both libraries, fed the same documents. Compile: schemas that people wrote and ones made at random, both
of the tests, over the same vocabulary. Throughput: the demo model (SmolLM2-135M) writes the same number of tokens free
and as JSON, greedy and drawn, with forced tokens drawn one by one so that both take the same steps; pairs of runs
alternate, the ratio is the median over pairs; ``hidden`` is the share of mask time during which the forward pass ran.
Wide: the same, drawn from the best 50, on a model with 129,280 logits and random weights, with each library. Jump:
model steps for a schema with long keys, with and without jumping forward. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import finish, machine, print_table, say
from widemodel import WIDTH, synthetic_vocabulary, wide_checkpoint

from deepinfer_core.api import ConstraintSpec, MaskJob, Vocabulary

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured_output"))
from random_schemas import random_schema
from real_schemas import real_schemas

PARTS = ("masks", "compile", "throughput", "wide", "jump")
LIBRARIES = ("llguidance", "xgrammar")

DOCUMENT_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "owner": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "role": {"enum": ["admin", "editor", "reader"]}},
            "required": ["name", "role"],
            "additionalProperties": False,
        },
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}, "price": {"type": "number"}},
                "required": ["sku", "count", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "title", "tags", "owner", "items"],
    "additionalProperties": False,
}
DOCUMENT = {
    "id": 4711,
    "title": "A quiet report of nothing",
    "tags": ["one", "two and a half", "漢字"],
    "owner": {"name": "Ada", "role": "editor"},
    "items": [{"sku": f"part-{i}", "count": i * 7, "price": i * 1.25} for i in range(6)],
}
LONG_KEYS = {
    "type": "object",
    "properties": {
        f"the_{word}_of_the_shipment_as_declared_by_the_carrier": {"type": "integer", "minimum": 0, "maximum": 99}
        for word in ("weight", "height", "width", "depth", "origin", "destination")
    },
    "additionalProperties": False,
}
LONG_KEYS["required"] = list(LONG_KEYS["properties"])  # type: ignore[arg-type]
ENDLESS = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 500}
ENDLESS_FOR_BOTH = {"type": "array", "items": {"type": "string"}, "minItems": 500}
"""xgrammar is not asked for lengths of strings."""


def compiler(library: str, vocabulary: Vocabulary) -> Any:
    from deepinfer_structured_output.compiler import GrammarCompiler

    return GrammarCompiler((library,), None, vocabulary)


def schema_spec(schema: Any) -> ConstraintSpec:
    return ConstraintSpec(kind="json", text=json.dumps(schema, ensure_ascii=False))


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "mean": statistics.fmean(ordered),
        **{name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in at.items()},
        "max": ordered[-1],
    }


def masks(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to fill one step's masks, and to accept its tokens."""
    vocabulary = synthetic_vocabulary()
    document = list(vocabulary.encode(json.dumps(DOCUMENT, ensure_ascii=False)))
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {"document_tokens": len(document)}
    for library in LIBRARIES:
        one = compiler(library, vocabulary)
        spec = schema_spec(DOCUMENT_SCHEMA)
        ready = milliseconds(lambda one=one, spec=spec: one.compile(spec))
        grammar = one.compile(spec)
        for batch in (1, 8) if options.quick else (1, 8, 32, 128):
            say(f"{library}, batch {batch}")
            states = [grammar.start(spec) for _ in range(batch)]
            for index, state in enumerate(states):
                state.accept(_spelled(state, document, index * 5 % (len(document) // 2)))
            buffer = np.full((batch, -(-WIDTH // 32)), -1, np.int32)
            fills, accepts = [], []
            for _ in range(10 if options.quick else 40):
                jobs = [MaskJob(state, row) for row, state in enumerate(states)]
                fills.append(milliseconds(lambda one=one, jobs=jobs, buffer=buffer: one.fill(jobs, buffer)))
                bits = np.unpackbits(buffer.view(np.uint8), axis=1, bitorder="little")
                tokens = [int(np.flatnonzero(row)[-1 if step % 3 else 0]) for step, row in enumerate(bits)]
                accepts.append(milliseconds(lambda states=states, tokens=tokens: _accept(states, tokens)))
                states = [grammar.start(spec) if state.is_finished else state for state in states]
            fill = percentiles(fills)
            rows.append((library, batch, fill["mean"], fill["p50"], fill["p99"], statistics.fmean(accepts), ready))
            result[f"{library}_{batch}"] = {"fill_ms": fill, "accept_ms": statistics.fmean(accepts)}
    print_table(("library", "batch", "fill ms", "p50", "p99", "accept ms", "first compile ms"), rows)
    return result


def _spelled(state: Any, document: Sequence[int], count: int) -> Sequence[int]:
    return document[:count]


def _accept(states: Sequence[Any], tokens: Sequence[int]) -> None:
    for state, token in zip(states, tokens, strict=True):
        state.accept((token,))


def compile_times(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to compile each schema of the sets, for the first time and from the cache."""
    source = random.Random(7)
    sets = {
        "written by people": [one.schema for one in real_schemas()],
        "made at random": [random_schema(source)[0] for _ in range(320)],
    }
    vocabulary = synthetic_vocabulary()
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {}
    for library in (*LIBRARIES, "routed"):
        from deepinfer_structured_output.compiler import GrammarCompiler

        one = GrammarCompiler(LIBRARIES if library == "routed" else (library,), None, vocabulary)
        one.compile(schema_spec({"type": "boolean"}))  # the vocabulary is prepared once
        if library == "routed":
            one.compile(ConstraintSpec(kind="ebnf", text='root ::= "a"'))
        hit = _cache_hit(one)
        for name, schemas in sets.items():
            # Some schemas of people take xgrammar many seconds: every eighth is enough to show it.
            say(f"{library}, schemas {name}")
            few = options.quick or (library == "xgrammar" and name == "written by people")
            times, refused = _compiled(one, schemas[::8] if few else schemas)
            found = percentiles(times)
            rows.append((library, name, len(times), refused, *(found[k] for k in ("p50", "p90", "p99", "max")), hit))
            result[f"{library}, {name}"] = {
                "compiled": len(times),
                "refused": refused,
                "ms": found,
                "cache_hit_us": hit,
            }
    print_table(("library", "schemas", "compiled", "refused", "p50 ms", "p90", "p99", "max", "cache hit us"), rows)
    return result


def _compiled(one: Any, schemas: Sequence[Any]) -> tuple[list[float], int]:
    """Milliseconds of each that is compiled; how many are refused."""
    from deepinfer_core.api import InvalidRequestError

    times, refused = [], 0
    for schema in schemas:
        spec = schema_spec(schema)
        start = time.perf_counter()
        try:
            one.compile(spec)
        except InvalidRequestError:
            refused += 1
        else:
            times.append(1e3 * (time.perf_counter() - start))
    return times, refused


def _cache_hit(one: Any) -> float:
    """Microseconds to find a compiled grammar again."""
    from deepinfer_core.engine.constraint_compile import CompilePool

    pool = CompilePool(lambda: one, threads=1, cache_bytes=1 << 30, grammar_bytes=1 << 30)
    cached = schema_spec({"type": "boolean"})
    while not pool.submit(cached).done:
        time.sleep(0.001)
    hit = milliseconds(lambda: [pool.submit(cached) for _ in range(1000)])
    pool.close()
    return hit


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Decode throughput with a grammar over that without, on the demo model."""
    tokens, pairs = (12, 2) if options.quick else (32, 5)
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {}
    with _engine("demo", 32) as (llm, watch):
        for batch in (32,) if options.quick else (1, 8, 32):
            for temperature in (0.0, 1.0):
                say(f"batch {batch}, temperature {temperature:g}")
                drawn = {"temperature": temperature}
                found = _beside_free(llm, watch, batch, drawn, ENDLESS, tokens, pairs)
                rows.append((batch, temperature, *found.values()))
                result[f"batch_{batch}_temperature_{temperature:g}"] = found
    print_table(("batch", "temperature", *_COLUMNS), rows)
    return result


def wide(options: argparse.Namespace) -> dict[str, Any]:
    """The same on a model with 129,280 logits and random weights, with each library."""
    tokens, pairs = (4, 1) if options.quick else (12, 3)
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {"weights": "random"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(wide_checkpoint(Path(folder)))
        for library in LIBRARIES:
            with _engine(checkpoint, 128, f"structured_output:{library}") as (llm, watch):
                for batch in (1, 8) if options.quick else (1, 8, 32, 128):
                    say(f"{library}, batch {batch}")
                    found = _beside_free(llm, watch, batch, {"top_k": 50}, ENDLESS_FOR_BOTH, tokens, pairs)
                    rows.append((library, batch, *found.values()))
                    result[f"{library}_{batch}"] = found
    print_table(("library", "batch", *_COLUMNS), rows)
    return result


_COLUMNS = ("json / free", "free ms/token", "json ms/token", "mask ms/step", "hidden")


@contextmanager
def _engine(model: str, batch: int, backend: str | None = None) -> Iterator[tuple[Any, _MaskWatch]]:
    from deepinfer_core import LLM

    settings: dict[str, Any] = {
        "logging.progress": False,
        "scheduling.max_running": batch,
        "structured_outputs.jump_forward": 0,
        "kv_cache.prefix_cache": False,
        "model.max_model_len": 1024,
        **({} if backend is None else {"structured_outputs.backend": backend}),
    }
    with LLM(model, accelerator="cpu", config=settings) as llm:
        watch = _MaskWatch(llm)
        try:
            yield llm, watch
        finally:
            watch.close()


def _beside_free(
    llm: Any, watch: _MaskWatch, batch: int, drawn: dict[str, Any], schema: Any, tokens: int, pairs: int
) -> dict[str, float]:
    """Pairs of runs, free and as JSON. Milliseconds per token of one request: each step gives one to every request."""
    from deepinfer_core import SamplingParams

    prompts = [f"Item {i}: " for i in range(batch)]
    common = {"max_tokens": tokens, "seed": 1, "ignore_eos": True, **drawn}
    kinds = (
        ("free", SamplingParams(**common)),
        ("json", SamplingParams(**common, structured_outputs={"json": schema})),
    )
    llm.generate(prompts, kinds[1][1], progress=False)
    watch.reset()
    ratios, seconds = [], {"free": [], "json": []}
    for _ in range(pairs):
        for name, params in kinds:
            watch.on = name == "json"
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            seconds[name].append(1e3 * (time.perf_counter() - start) / tokens)
            assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        ratios.append(seconds["free"][-1] / seconds["json"][-1])
    return {
        "ratio": statistics.median(ratios),
        "free_ms_per_token": statistics.median(seconds["free"]),
        "json_ms_per_token": statistics.median(seconds["json"]),
        "mask_ms_per_step": watch.filling / max(1, watch.steps),
        "hidden": 1 - watch.waiting / max(watch.filling, 1e-9),
    }


class _MaskWatch:
    """Counts milliseconds that masks were being filled, and that sampling waited for them, while ``on``."""

    def __init__(self, llm: Any) -> None:
        from deepinfer_core.engine.constraint_masks import StepMasks

        self.on = False
        self.reset()
        filler = llm.engine.core.constraints._filler
        fill, self._wait = filler._fill, StepMasks.wait

        def timed_fill(*arguments: Any) -> None:
            spent = milliseconds(lambda: fill(*arguments))
            if self.on:
                self.filling += spent
                self.steps += 1

        def timed_wait(masks: StepMasks) -> Any:
            start = time.perf_counter()
            found = self._wait(masks)
            if self.on:
                self.waiting += 1e3 * (time.perf_counter() - start)
            return found

        filler._fill = timed_fill
        StepMasks.wait = timed_wait  # type: ignore[method-assign]

    def reset(self) -> None:
        self.filling, self.waiting, self.steps = 0.0, 0.0, 0

    def close(self) -> None:
        from deepinfer_core.engine.constraint_masks import StepMasks

        StepMasks.wait = self._wait  # type: ignore[method-assign]


def jump(options: argparse.Namespace) -> dict[str, Any]:
    """Model steps for one document with long keys; the text must be the same."""
    from deepinfer_core import LLM, SamplingParams

    steps, texts = {}, set()
    for most in (0, 32):
        settings = {"logging.progress": False, "structured_outputs.jump_forward": most}
        with LLM("demo", accelerator="cpu", config=settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=400, structured_outputs={"json": LONG_KEYS})
            planner = llm.engine.core.planner
            before = planner.steps
            (output,) = llm.generate(["A shipment: "], params, progress=False)
            steps[most] = planner.steps - before
            texts.add(output.outputs[0].text)
            if output.outputs[0].finish_reason != "stop":
                raise RuntimeError(f"the document did not end: {output.outputs[0].text}")
    found = {
        "steps_one_by_one": steps[0],
        "steps": steps[32],
        "fewer": steps[0] / steps[32],
        "same_text": len(texts) == 1,
    }
    print_table(("one by one", "jumping", "fewer", "same text"), [tuple(found.values())])
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--quick", action="store_true", help="a minute, for a look")
    options.add_argument("--json", action="store_true", help="the numbers as a JSON object, last line")
    options.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    options.add_argument("--threads", type=int, default=0, help="threads of torch; 0: its own choice")
    chosen = options.parse_args()
    wanted = chosen.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        options.error(f"--only {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    runs = {"masks": masks, "compile": compile_times, "throughput": throughput, "wide": wide, "jump": jump}
    result: dict[str, Any] = {"machine": machine()}
    for part in wanted:
        print(f"\n{part}", flush=True)
        result[part] = runs[part](chosen)
    finish(result, chosen.json)


if __name__ == "__main__":
    main()
