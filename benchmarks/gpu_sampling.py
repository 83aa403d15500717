"""Sampling of ``gpu_ops.py``: the region, its stages one after the other, each stage alone, and torch's operators.

Rows are normal logits of a deviation, or like a language model's: deviation 2, and a dozen tokens 12 higher.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from gpu_common import Results, build, compile_all

from deepinfer_core.api import SampleTokensRequest, SamplingBatch, SamplingRequest, SamplingState

VOCAB = 129280
KINDS = ("lm", "3", "2", "1")
CUTS = {"top_k 50": (50, 1.0), "top_p 0.9": (0, 0.9), "both": (50, 0.9), "draw": (0, 1.0)}
ROWS = (1, 8, 64, 256)
TEMPERATURE = 0.8


def logits_of(kind: str, rows: int) -> torch.Tensor:
    source = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn((rows, VOCAB), device="cuda", generator=source) * (2.0 if kind == "lm" else float(kind))
    if kind == "lm":
        ids = torch.randint(0, VOCAB, (rows, 12), device="cuda", generator=source)
        logits.scatter_add_(1, ids, torch.full((rows, 12), 12.0, device="cuda"))
    return logits


def sampling_step(rows: int) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    f32, none = torch.float32, torch.full((rows, 1), -1, device="cuda")
    state = SamplingState(
        history=torch.zeros((rows, 256), dtype=torch.int32, device="cuda"),
        prompt_len=full(100),
        temperature=full(0.8, f32),
        min_p=full(0.02, f32),
        top_p=full(0.9, f32),
        top_k=full(50),
        presence=full(0.1, f32),
        frequency=full(0.1, f32),
        repetition=full(1.1, f32),
        seed_lo=torch.arange(rows, device="cuda"),
        seed_hi=full(7),
        child=full(0),
        min_end=full(0),
        stop_ids=none,
        bias_ids=none,
        bias_values=none.to(f32),
        bad_words=none[:, :, None],
        allowed=None,
    )
    slots = torch.arange(rows, device="cuda")
    return SamplingBatch(
        state=state, slots=slots, positions=full(200), token_limit=129280, active=frozenset(), max_position=200
    )


def step_of(cut: str, rows: int) -> SamplingBatch:
    """Rows at one temperature, with this cut."""
    top_k, top_p = CUTS[cut]
    step = sampling_step(rows)
    step.state.temperature.fill_(TEMPERATURE)
    step.state.top_k.fill_(top_k)
    step.state.top_p.fill_(top_p)
    names = {"temperature", *(["top_k"] if top_k else []), *(["top_p"] if top_p < 1 else [])}
    step.active = frozenset(names)
    return step


class Sampling:
    """The region and the stages, built once."""

    def __init__(self) -> None:
        self._region = build(SampleTokensRequest(vocab_size=VOCAB, device_type="cuda"))
        self._stages = {
            stage: build(SamplingRequest(stage=stage, vocab_size=VOCAB, device_type="cuda"))
            for stage in ("temperature", "top_k", "top_p", "draw", "penalties", "mask")
        }

    def region(self, logits: torch.Tensor, step: SamplingBatch) -> Any:
        return self._region.run(logits, step)

    def stage(self, name: str, logits: torch.Tensor, step: SamplingBatch) -> Any:
        return self._stages[name].run(logits, step)

    def parts(self, logits: torch.Tensor, step: SamplingBatch) -> Any:
        for name in ("temperature", "top_k", "top_p"):
            if name in step.active:
                logits = self.stage(name, logits, step)
        return self.stage("draw", logits, step)


def by_torch(logits: torch.Tensor, cut: str) -> torch.Tensor:
    """The same with torch's sort and multinomial."""
    top_k, top_p = CUTS[cut]
    ordered, ids = (logits / TEMPERATURE).sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    shares = ordered.softmax(-1)
    if top_p < 1:
        shares = torch.where(shares.cumsum(-1) - shares < top_p, shares, 0.0)
    return ids.gather(1, torch.multinomial(shares, 1))


def copies(rows: int) -> int:
    """Copies of the logits that keep each other out of the cache."""
    return max(2, min(16, 512 // rows))


def timed(call: Any, kind: str, cut: str, rows: int, bandwidth: float, *, overwrites: bool) -> dict[str, Any]:
    from deepinfer_nvidia_sm100.measure import microseconds, microseconds_once

    step, logits = step_of(cut, rows), logits_of(kind, rows)
    sets = [logits.clone() for _ in range(copies(rows))]

    def restore() -> None:
        for each in sets:
            each.copy_(logits)

    calls = [lambda each=each: call(each, step) for each in sets]
    spent = microseconds_once(calls, restore) if overwrites else microseconds(calls)
    return {"us": spent, "passes": spent / (4 * rows * VOCAB / bandwidth * 1e6)}


def measure(results: Results, bandwidth: float, quick: bool) -> list[list[Any]]:
    """Rows for the table: name, us, nothing, torch's us, passes over the logits."""
    sampling = Sampling()
    small = logits_of("2", 2)
    warm = [lambda c=cut: sampling.region(small, step_of(c, 2)) for cut in CUTS]
    compile_all([*warm, lambda: sampling.parts(small.clone(), step_of("both", 2))])
    table: list[list[Any]] = []

    def record(key: str, call: Any, kind: str, cut: str, rows: int, library: Any = None, **options: Any) -> None:
        def one() -> dict[str, Any]:
            found = timed(call, kind, cut, rows, bandwidth, **options)
            if library is not None:
                found["torch_us"] = timed(library, kind, cut, rows, bandwidth, overwrites=False)["us"]
            return found

        found = results.measure(f"sampling {key} {rows}", one)
        table.append([f"{key} {rows}", found.get("us"), None, found.get("torch_us"), found.get("passes")])

    for rows in (1, 256) if quick else ROWS:
        for kind in KINDS:
            for cut in CUTS:
                if cut == "draw" and kind != "2":
                    continue
                library = (lambda x, _, c=cut: by_torch(x, c)) if kind == "2" and rows in (1, 256) else None
                record(f"region, {cut}, {kind}", sampling.region, kind, cut, rows, library, overwrites=False)
    for rows in (1, 256):
        for kind, cut in (("lm", "both"), ("lm", "top_p 0.9"), ("1", "top_p 0.9"), ("2", "top_k 50"), ("2", "draw")):
            record(f"parts, {cut}, {kind}", sampling.parts, kind, cut, rows, overwrites=True)
        for stage, cut in (
            ("temperature", "draw"),
            ("draw", "draw"),
            ("top_k", "top_k 50"),
            ("penalties", "draw"),
            ("mask", "draw"),
        ):
            record(f"stage {stage}, 2", lambda x, s, n=stage: sampling.stage(n, x, s), "2", cut, rows, overwrites=True)
        for kind in KINDS:
            call = lambda x, s: sampling.stage("top_p", x, s)  # noqa: E731
            record(f"stage top_p, {kind}", call, kind, "top_p 0.9", rows, overwrites=True)
    return table


if __name__ == "__main__":
    sys.exit("gpu_sampling.py is a part of another: python benchmarks/gpu_ops.py --only sampling")
