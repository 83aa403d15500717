"""The FP8 part of ``gpu_ops.py``: products with weights in FP8 blocks, and a cache in FP8.

Times of rounded rows leave out the rounding itself, as those of the libraries do; it has a line of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_read
import torch
from gpu_common import Results, build

SHAPES = {
    "example": (7168, 4096),
    "o_b": (4096, 8192),
    "shared_gate_up": (4096, 4096),
    "q_b": (32768, 1024),
    "qkv_a": (1536, 4096),
    "shared_down": (4096, 2048),
}
"""Rows and columns: DeepSeek-V4's with 4,096 channels, after one that others quote."""
COMPARED = {name: (64, 512, 4096) if name == "example" else (512, 4096) for name in SHAPES}
"""Shapes and rows that DeepGEMM multiplies too: it compiles some seconds for each."""
DECODE = ((1, 8192), (1, 131072), (8, 8192), (64, 1024), (64, 8192), (256, 4096))


def linear(name: str, rows: int, tuner: Any, bandwidth: float, tables: bool) -> dict[str, Any]:
    """Microseconds of this package's answers, of the libraries, and of reading the weight once."""
    from deepinfer_nvidia_sm100.fp8_tuning import made_weights
    from deepinfer_nvidia_sm100.measure import microseconds, rotations
    from deepinfer_nvidia_sm100.ops.quantise_rows import quantise_rows

    out_features, in_features = SHAPES[name]
    shape = (out_features, in_features, "bfloat16")
    found: dict[str, Any] = {"shape": f"{out_features}x{in_features}", "rows": rows}
    found["plain"] = tuner.best("plain", shape, rows, tables)
    found["rounded"] = tuner.best("rounded", shape, rows, tables)
    found["floor_us"] = out_features * in_features / bandwidth * 1e6
    found["read_us"] = gpu_read.read_us(out_features * in_features)
    weights = made_weights(shape, rotations(out_features * in_features, 16))
    x = torch.randn(rows, in_features, device="cuda", dtype=torch.bfloat16)
    data, scale = quantise_rows(x)
    found["round_us"] = microseconds([lambda: quantise_rows(x)])
    out = torch.empty((rows, out_features), device="cuda", dtype=torch.bfloat16)

    def library(key: str, calls: list[Callable[[], object]]) -> None:
        try:
            found[key] = microseconds(calls)
        except RuntimeError as error:
            found[key.replace("_us", "_error")] = str(error)[:200]

    if rows in COMPARED.get(name, ()) and importlib.util.find_spec("deep_gemm") is not None:
        import deep_gemm

        def product(w: Any) -> Callable[[], object]:
            pairs = (data, scale.t()), (w.data, w.scale)
            return lambda: deep_gemm.fp8_gemm_nt(*pairs, out, recipe=(1, 128, 128))

        library("deep_gemm_us", [product(w) for w in weights])
    ones = torch.ones((rows, 1), device="cuda"), torch.ones((1, out_features), device="cuda")
    library(
        "scaled_mm_us",
        [lambda w=w: torch._scaled_mm(data, w.data.t(), *ones, out_dtype=torch.bfloat16) for w in weights],
    )
    wide = [w.data.to(torch.bfloat16) for w in weights]
    library("bf16_us", [lambda w=w: torch.nn.functional.linear(x, w) for w in wide])
    return found


def errors(rows: int = 256, out_features: int = 4096, in_features: int = 4096) -> dict[str, float]:
    """Relative errors against float64: of the kernels, and of rounding the rows, alone and all together.

    ``bf16`` is the error of the same product with everything in bfloat16. Inputs are normal, with a scale for each
    channel that is spread over a factor of e each way.
    """
    from deepinfer_nvidia_sm100.fp8_tuning import made_weights

    from deepinfer_core.api import LinearRequest, QuantisedWeight

    (weight,) = made_weights((out_features, in_features, "bfloat16"), 1)
    bits = (weight.scale.view(torch.int32) >> 23).to(torch.uint8)
    part = QuantisedWeight(format="fp8:e4m3", data=weight.data, scale=bits.view(torch.float8_e8m0fnu), block=(128, 128))
    wide = weight.data.double() * weight.scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = torch.randn(in_features, device="cuda").clamp(-1, 1).exp()
    x = (torch.randn(rows, in_features, device="cuda") * spread).to(torch.bfloat16)
    exact = x.double() @ wide.T

    def run(activations: str) -> torch.Tensor:
        request = LinearRequest(
            in_features=in_features,
            out_features=out_features,
            dtype="bfloat16",
            out_dtype="bfloat16",
            weight_dtype=part.weight_dtype,
            activations=activations,
            device_type="cuda",
        )
        op = build(request, "rounded_fp8_linear" if activations else "fp8_linear")
        result: torch.Tensor = op.run(x, op.prepare([part]))
        return result.double()

    def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
        return float((found - expected).norm() / expected.norm())

    from deepinfer_nvidia_sm100.ops.quantise_rows import quantise_rows

    data, scale = quantise_rows(x)
    rounded = data.double() * scale.t().double().repeat_interleave(128, 1)
    return {
        "plain": relative(run(""), exact),
        "rounded, against exact": relative(run("fp8:e4m3:128"), exact),
        "rounded, against rounded rows": relative(run("fp8:e4m3:128"), rounded @ wide.T),
        "rounding of the rows alone": relative(rounded @ wide.T, exact),
        "bf16": relative((x @ wide.to(torch.bfloat16).T).double(), exact),
    }


def save_table(results: Results, path: Path) -> None:
    """The answers of all measured shapes, as a table of tuned tiles."""
    from deepinfer_nvidia_sm100 import fp8_tuning, tuning

    for kind in ("plain", "rounded"):
        shapes: dict[str, list[dict[str, Any]]] = {}
        for key, found in results.entries.items():
            if key.startswith("fp8 ") and kind in found:
                shapes.setdefault(found["shape"], []).append(found[kind])
        answers = {shape: fp8_tuning.entries(measured) for shape, measured in shapes.items()}
        tuning.save(path, answers, f"fp8_{kind}")


def measure(
    results: Results, bandwidth: float, quick: bool, tables: bool, attend: Callable[..., dict[str, Any]]
) -> list[list[Any]]:
    """All of it; rows of a table. ``attend(requests, context, bandwidth, cache_dtype)`` times decode attention;
    ``tables``: tiles of the package's tables instead of the fastest of all."""
    from deepinfer_nvidia_sm100 import fp8_tuning

    rows: list[list[Any]] = []
    found = results.measure("errors in fp8", errors)
    rows += [[f"relative error, {name}", value] for name, value in found.items() if isinstance(value, float)]
    for requests, context in DECODE[::3] if quick else DECODE:
        for kept in ("bfloat16", "float8_e4m3fn"):
            key = f"cache {kept} {requests}x{context}"
            found = results.measure(key, lambda r=requests, c=context, k=kept: attend(r, c, bandwidth, k))
            rows.append([key, found.get("us"), found.get("of_bandwidth")])
    counts = (1, 64, 4096) if quick else (1, 16, 64, 128, 512, 4096) if tables else fp8_tuning.ROWS
    names = list(SHAPES)[:1] if quick else list(SHAPES)
    tuner = fp8_tuning.Fp8Tuner()
    tuner.compile([(*SHAPES[name], "bfloat16") for name in names], counts, tables)
    for count in sorted(counts, key=lambda rows: rows not in (512, 4096)):  # first those that are compared
        for name in names:
            key = f"fp8 {name} {count}"
            found = results.measure(key, lambda n=name, c=count: linear(n, c, tuner, bandwidth, tables))
            if "error" in found:
                continue
            operations = 2e-6 * SHAPES[name][0] * SHAPES[name][1] * count
            for kind in ("plain", "rounded"):
                us = found[kind]["us"]
                rows.append([f"{key} {kind}", us, found["floor_us"] / us, None, operations / us, found[kind]["answer"]])
            for library in ("deep_gemm", "scaled_mm", "bf16"):
                if us := found.get(f"{library}_us"):
                    rows.append([f"{key} {library}", None, None, us, operations / us])
    return rows


if __name__ == "__main__":
    sys.exit("gpu_fp8.py is a part of another: python benchmarks/gpu_ops.py --only fp8")
