"""Structured output: masks, compilation, throughput beside unconstrained text, and tokens that need no step.

    python benchmarks/structured_output.py [--quick] [--json] [--only masks,compile,throughput,jump] [--threads N]

Masks: one row for each request, over a synthetic byte-level vocabulary of 129,280 tokens, in the middle of a nested
JSON document; both libraries, fed the same documents. Compile: the schemas of ``random_schemas`` in the tests over the
same vocabulary. Throughput: the demo model (SmolLM2-135M) writes the same number of tokens free and as JSON, with
forced tokens drawn one by one so that both take the same steps; pairs of runs alternate, the ratio is the median over
pairs; ``hidden`` is the share of mask time during which the forward pass ran. Jump: model steps for a schema with long
keys, with and without jumping forward. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import finish, machine, print_table

from deepinfer_core.api import ConstraintSpec, MaskJob, Vocabulary

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "structured_output"))
from random_schemas import random_schema

PARTS = ("masks", "compile", "throughput", "jump")
LIBRARIES = ("llguidance", "xgrammar")
WIDTH = 129_280

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


def synthetic_tokens(count: int = WIDTH) -> list[bytes]:
    """All bytes, pieces of JSON and words of syllables, in the proportions of a large byte-level vocabulary."""
    source = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on", "st")]
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    for piece in ('{"', '":', '": "', '", "', '"}', "},", '": ', '": [', '"],', "true", "false", "null", "  ", "\n"):
        found.setdefault(piece.encode())
    while len(found) < count - 1:
        kind = source.random()
        if kind < 0.85:
            word = "".join(source.choice(syllables) for _ in range(source.randint(1, 4)))
            text = (" " if source.random() < 0.5 else "") + (word.title() if source.random() < 0.2 else word)
        elif kind < 0.92:
            text = str(source.randrange(1000)) + source.choice(["", ",", ".", '"', "}"])
        else:
            text = "".join(chr(source.randint(0x4E00, 0x9FA5)) for _ in range(source.randint(1, 3)))
        found.setdefault(text.encode())
    return list(found)


def synthetic_vocabulary() -> Vocabulary:
    tokens = synthetic_tokens()
    ids = {token: number for number, token in enumerate(tokens)}
    longest = max(map(len, tokens))

    def encode(text: str) -> list[int]:
        data, out = text.encode(), []
        while data:
            size = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
            out.append(ids[data[:size]])
            data = data[size:]
        return out

    return Vocabulary(
        width=WIDTH,
        read_tokens=lambda: [*tokens, b""],
        special_ids=frozenset({WIDTH - 1}),
        eos_token_ids=(WIDTH - 1,),
        encode=encode,
    )


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
    """Milliseconds to compile each schema of the set, for the first time and from the cache."""
    from deepinfer_core.api import InvalidRequestError
    from deepinfer_core.engine.constraint_compile import CompilePool

    source = random.Random(7)
    schemas = [random_schema(source)[0] for _ in range(40 if options.quick else 300)]
    vocabulary = synthetic_vocabulary()
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {}
    for library in (*LIBRARIES, "routed"):
        from deepinfer_structured_output.compiler import GrammarCompiler

        one = GrammarCompiler(LIBRARIES if library == "routed" else (library,), None, vocabulary)
        one.compile(schema_spec({"type": "boolean"}))  # the vocabulary is prepared once
        times, refused = [], 0
        for schema in schemas:
            start = time.perf_counter()
            try:
                one.compile(schema_spec(schema))
            except InvalidRequestError:
                refused += 1
            else:
                times.append(1e3 * (time.perf_counter() - start))
        pool = CompilePool(lambda one=one: one, threads=1, cache_bytes=1 << 30, grammar_bytes=1 << 30)
        cached = schema_spec({"type": "boolean"})
        while not pool.submit(cached).done:
            time.sleep(0.001)
        hit = milliseconds(lambda pool=pool, cached=cached: [pool.submit(cached) for _ in range(1000)])
        pool.close()
        found = percentiles(times)
        rows.append((library, len(times), refused, found["p50"], found["p90"], found["p99"], found["max"], hit))
        result[library] = {"compiled": len(times), "refused": refused, "ms": found, "cache_hit_us": hit}
    print_table(("library", "schemas", "refused", "p50 ms", "p90", "p99", "max", "cache hit us"), rows)
    return result


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Decode throughput with a grammar over that without, on the demo model."""
    from deepinfer_core import LLM, SamplingParams

    tokens, pairs = (12, 2) if options.quick else (48, 5)
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {}
    for batch in (8,) if options.quick else (1, 8, 32):
        settings = {"logging.progress": False, "scheduling.max_running": batch, "structured_outputs.jump_forward": 0}
        with LLM("demo", accelerator="cpu", config={**settings, "kv_cache.prefix_cache": False}) as llm:
            watch = _MaskWatch(llm)
            prompts = [f"Item {i}: " for i in range(batch)]
            common = {"max_tokens": tokens, "seed": 1, "ignore_eos": True}
            free = SamplingParams(**common)
            bound = SamplingParams(**common, structured_outputs={"json": ENDLESS})
            llm.generate(prompts, bound, progress=False)
            ratios, seconds = [], {"free": [], "json": []}
            for _ in range(pairs):
                for name, params in (("free", free), ("json", bound)):
                    outputs: list[Any] = []
                    watch.on = name == "json"
                    spent = milliseconds(
                        lambda p=params, o=outputs, t=prompts: o.extend(llm.generate(t, p, progress=False))
                    )
                    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
                    seconds[name].append(spent / tokens)
                ratios.append(seconds["free"][-1] / seconds["json"][-1])
            found = {
                "ratio": statistics.median(ratios),
                "free_ms_per_step": statistics.median(seconds["free"]),
                "json_ms_per_step": statistics.median(seconds["json"]),
                "mask_ms_per_step": watch.filling / max(1, watch.steps),
                "hidden": 1 - watch.waiting / max(watch.filling, 1e-9),
            }
        rows.append((batch, *found.values()))
        result[f"batch_{batch}"] = found
    print_table(("batch", "json / free", "free ms/step", "json ms/step", "mask ms/step", "hidden"), rows)
    return result


class _MaskWatch:
    """Counts milliseconds that masks were being filled, and that sampling waited for them."""

    def __init__(self, llm: Any) -> None:
        from deepinfer_core.engine.constraint_masks import StepMasks

        self.on, self.filling, self.waiting, self.steps = False, 0.0, 0.0, 0
        filler = llm.engine.core.constraints._filler
        fill, wait = filler._fill, StepMasks.wait

        def timed_fill(*arguments: Any) -> None:
            spent = milliseconds(lambda: fill(*arguments))
            if self.on:
                self.filling += spent
                self.steps += 1

        def timed_wait(masks: StepMasks) -> Any:
            start = time.perf_counter()
            found = wait(masks)
            if self.on:
                self.waiting += 1e3 * (time.perf_counter() - start)
            return found

        filler._fill = timed_fill
        StepMasks.wait = timed_wait  # type: ignore[method-assign]


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
    runs = {"masks": masks, "compile": compile_times, "throughput": throughput, "jump": jump}
    result: dict[str, Any] = {"machine": machine()}
    for part in wanted:
        print(f"\n{part}", flush=True)
        result[part] = runs[part](chosen)
    finish(result, chosen.json)


if __name__ == "__main__":
    main()
