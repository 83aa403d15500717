"""What batch invariance costs on a GPU: the plugin's Triton operators against torch's, and a model's decode steps.

    python benchmarks/gpu_invariance.py --out results [--ops] [--model] [--overrides MODULE] [--json]

Operators: medians of launches in a graph over inputs that rotate through the cache, beside ``torch.nn.functional`` on
the same shapes; ``--overrides`` names a module with ``matmul_persistent(a, b)``, ``rms_norm_batch_invariant`` and
``log_softmax`` to time beside them: vLLM's ``vllm.model_executor.determinism.batch_invariant``, which took them over
from thinking-machines' ``batch_invariant_ops``.
The model has the shape of Qwen3-4B, random, bfloat16, on the NVIDIA backend three times: as it is, with
``features.batch_invariant`` and its own operators, and with this plugin's for products and norms. Before it is timed, a
request's log-probabilities alone are compared bit by bit with those it has in a batch. A step's time is from result to
result; beside it stands the device's own, without what it waits for the host, which is all that counts with --quick:
four layers are done sooner than the host has launched the next step.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import finish, print_table, random_prompts
from gpu_common import Results, compile_all, plugin_paths, require_gpu

TARGET = 1.10
"""Longest decode step against the default's from 32 requests on."""
SHAPES = {"gate_up": (19456, 2560), "down": (2560, 9728), "head": (151936, 2560)}
"""Output and input channels of Qwen3-4B."""
ROWS = (1, 8, 32, 128, 512, 2048)
PLUGIN = "deepinfer_batch_invariance.plugin"
GENERIC = {
    "ops.gemm.linear": ("batch_invariance:triton_linear",),
    "ops.pointwise.rms_norm": ("batch_invariance:triton_rms_norm",),
    "ops.fused.gated_linear": ("parts",),
}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "invariant": {"features.batch_invariant": True},
    "invariant, generic": {"features.batch_invariant": True, **GENERIC},
}
BATCHES = (1, 32, 64, 256)
NAMES = ["ours", "torch", "theirs"]
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--ops", action="store_true", help="operators only")
    parser.add_argument("--model", action="store_true", help="the model only")
    parser.add_argument("--overrides", help="a module whose matmul_persistent is timed beside")
    parser.add_argument("--checkpoint", type=Path, help="where the model goes")
    parser.add_argument("--quick", action="store_true", help="fewer rows and batches, four layers")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    options = parser.parse_args()
    require_gpu("gpu_invariance")
    results = Results(options.out / "gpu_invariance.json", options.quick)
    with torch.inference_mode():
        if not options.model:
            operators(results, options)
    if not options.ops:
        model(results, options)
    finish(results.entries, options.json)


def operators(results: Results, options: argparse.Namespace) -> None:
    """Microseconds of each operator, ours and torch's."""
    from deepinfer_nvidia_sm100.measure import microseconds

    overrides = importlib.import_module(options.overrides) if options.overrides else None
    rows = (1, 32) if options.quick else ROWS
    cases = [*linears("bfloat16", rows, overrides), *linears("float32", (1, 32, 512), None), *others(rows, overrides)]
    table = []
    for key, (ways, names) in cases:
        timed = zip(names, ways, strict=True)
        found = results.measure(key, lambda t=timed: {name: microseconds(call) for name, call in t})
        if "error" not in found:
            table.append(
                [key, *(found.get(name) for name in ("ours", "torch", "theirs")), found["ours"] / found["torch"]]
            )
            print(table[-1], flush=True)
    print_table(("operator", "ours, us", "torch, us", "overrides, us", "ours / torch"), table)


Case = tuple[str, tuple[list[list[Call]], list[str]]]


def linears(dtype: str, rows: tuple[int, ...], overrides: Any) -> list[Case]:
    from deepinfer_batch_invariance.triton_gemm import FixedTileLinear, Weight
    from deepinfer_nvidia_sm100.measure import rotations

    from deepinfer_core.api import LinearRequest

    cases: list[Case] = []
    kind: torch.dtype = getattr(torch, dtype)
    shapes = SHAPES if dtype == "bfloat16" else {"down": SHAPES["down"]}
    requests = {
        name: LinearRequest(
            in_features=inner, out_features=out, bias=False, dtype=dtype, out_dtype=dtype, weight_dtype=dtype
        )
        for name, (out, inner) in shapes.items()
    }
    empty = {name: torch.empty(shape, device="cuda", dtype=kind) for name, shape in shapes.items()}
    # What preparing finds out about garbage is forgotten.
    compile_all([lambda n=n: FixedTileLinear(requests[n], context()).prepare([empty[n]]) for n in shapes])
    for name, (out, inner) in shapes.items():
        op = FixedTileLinear(requests[name], context())
        count = rotations(out * inner * kind.itemsize, 4)
        weights = [torch.randn(out, inner, device="cuda", dtype=kind) for _ in range(count)]
        ready = [op.prepare([weights[0]]), *(Weight(weight, None) for weight in weights[1:])]
        for n in rows:
            x = torch.randn(n, inner, device="cuda", dtype=kind)
            ways: list[list[Call]] = [
                [lambda x=x, w=w, op=op: op.run(x, w) for w in ready],
                [lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in weights],
            ]
            if overrides is not None:
                ways.append([lambda x=x, w=w: overrides.matmul_persistent(x, w.t()) for w in weights])
            cases.append((f"linear {name} {dtype}, {n} rows", (ways, NAMES[: len(ways)])))
    return cases


def others(rows: tuple[int, ...], overrides: Any) -> list[Case]:
    """Norm, log-probabilities, and the sum over a token's experts, which the overrides do not have."""
    from deepinfer_batch_invariance import triton_ops

    from deepinfer_core.api import MoeExchangeRequest, RmsNormRequest

    hidden, vocab, top_k = 2560, 151936, 8
    norm = triton_ops.RowNorm(RmsNormRequest(hidden=hidden, eps=1e-6, dtype="bfloat16"), context())
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    exchange = triton_ops.OrderedExchange(
        MoeExchangeRequest(experts=64, top_k=top_k, hidden=hidden, dtype="bfloat16"), context()
    )
    cases: list[Case] = []
    for n in rows:
        x = torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16)
        ways: list[list[Call]] = [
            [lambda x=x: norm.run(x, weight)],
            [lambda x=x: torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-6)],
        ]
        if overrides is not None:
            ways.append([lambda x=x: overrides.rms_norm_batch_invariant(x, weight, 1e-6)])
        cases.append((f"rms_norm, {n} rows", (ways, NAMES[: len(ways)])))
        ids = torch.rand(n, 64, device="cuda").topk(top_k).indices.sort().values
        sent = exchange.dispatch(x, ids, torch.rand(n, top_k, device="cuda"))
        places = sent.handle.places

        def added(rows: torch.Tensor = sent.rows, places: torch.Tensor = places, n: int = n) -> torch.Tensor:
            return rows.index_select(0, places).view(n, top_k, hidden).sum(1, dtype=torch.float32)

        cases.append(
            (f"combine, {n} rows", ([[lambda s=sent: exchange.combine(s.rows, s.handle)], [added]], ["ours", "torch"]))
        )
        if n <= 128:
            logits = torch.randn(n, vocab, device="cuda")
            found = torch.empty_like(logits)

            def ours(logits: torch.Tensor = logits, found: torch.Tensor = found) -> None:
                triton_ops.log_softmax(logits, found)

            ways = [[ours], [lambda x=logits: torch.log_softmax(x, -1)]]
            if overrides is not None:
                ways.append([lambda x=logits: overrides.log_softmax(x, -1)])
            cases.append((f"log_softmax, {n} rows", (ways, NAMES[: len(ways)])))
    return cases


def context() -> Any:
    from deepinfer_core.api import BuildContext

    return BuildContext(
        device=torch.device("cuda", 0),
        max_tokens=2048,
        max_requests=256,
        max_model_len=8192,
        num_threads=1,
        settings=None,
        reference=lambda request: None,
    )


def model(results: Results, options: argparse.Namespace) -> None:
    """Milliseconds of a decode step, and tokens a second of prompts, in each mode."""
    from gpu_engine import PROMPT, QUICK, QWEN3_4B, Engine, checkpoint

    began = time.monotonic()
    name, config = ("qwen3-4-layers", QUICK) if options.quick else ("qwen3-4b-random", QWEN3_4B)
    path = checkpoint(options.checkpoint or Path("/dev/shm") / name, config)
    print(f"checkpoint: {time.monotonic() - began:.1f} s", flush=True)
    batches = (1, 32) if options.quick else BATCHES
    for mode, settings in MODES.items():
        paths = [*plugin_paths(), *([] if installed(PLUGIN) else [PLUGIN])]
        engine = Engine(
            path,
            **{
                "plugins.paths": paths,
                "kv_cache.memory_fraction": 0.8,
                "scheduling.max_running": batches[-1],
                **settings,
            },
        )
        results.measure(f"graphs, {mode}", lambda e=engine: {"mode": e.llm.engine.planned.plan.facts["decode_graphs"]})
        results.measure(f"bits, {mode}", lambda e=engine: {"moved": moved(e.llm)})
        for batch in batches:
            results.measure(f"decode {batch}, {mode}", lambda b=batch, e=engine: steps(e, [PROMPT] * b))
        results.measure(f"prefill, {mode}", lambda e=engine: {"tokens_per_second": e.prefill(4, 2048)})
        print({key: value for key, value in results.entries.items() if key.endswith(f", {mode}")}, flush=True)
        engine.close()
        del engine
    rows = []
    for what in ("ms", "device_ms"):
        for batch in batches:
            ms = [results.entries[f"decode {batch}, {mode}"].get(what, float("nan")) for mode in MODES]
            target = TARGET if batch >= 32 else None
            rows.append([f"decode, batch {batch}, {what}", *ms, ms[1] / ms[0], ms[2] / ms[0], target])
    speeds = [results.entries[f"prefill, {mode}"].get("tokens_per_second", float("nan")) for mode in MODES]
    rows.append(["prefill 4 x 2048, tokens/s", *speeds, speeds[0] / speeds[1], speeds[0] / speeds[2], None])
    print_table(("what", *MODES, "ratio", "ratio, generic", "target"), rows)


def steps(engine: Any, lengths: list[int]) -> dict[str, float]:
    """Milliseconds of a decode step, and those of them in which the device works."""
    found: dict[str, float] = engine.step_ms(lengths)
    return {**found, "device_ms": engine.busy_ms(lengths)}


def installed(module: str) -> bool:
    from importlib.metadata import entry_points

    return any(entry.value == module for entry in entry_points(group="deepinfer.plugins.v1"))


def moved(llm: Any, out: int = 24) -> int:
    """Requests of 32 whose tokens or log-probabilities are others in a batch, of prompts in chunks, than alone."""
    from deepinfer_core import SamplingParams

    vocab = llm.engine.planned.spec.vocab_size
    prompts = [prompt[: 20 + 13 * n] for n, prompt in enumerate(random_prompts(32, 520, seed=3, vocab_size=vocab))]
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True, logprobs=1)
    together = llm.generate(prompts, params)
    differing = 0
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        differing += alone.outputs[0].logprobs != output.outputs[0].logprobs
    return differing


if __name__ == "__main__":
    sys.exit(main())
