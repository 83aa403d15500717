"""Compiles what the operators launch for a GPU that is not there, and says what each kernel takes of it.

``python cross_compile.py CAPABILITY CASE`` runs the operators of one case over host tensors with a driver that only
names the target, compiles each launch, and writes one JSON line for each kernel: registers, bytes of stack (spills),
shared and tensor memory, and the matrix instructions in its PTX. Nothing is launched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a machine that has a GPU, too, everything lies in the host's memory
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "core")]

import attrs
import numpy as np
import torch
import triton
from deepinfer_nvidia_sm100 import tables
from deepinfer_nvidia_sm100.fp8_tuning import HOPPER
from deepinfer_nvidia_sm100.ops import chain, paged_attention, temperature
from deepinfer_nvidia_sm100.ops import fp8_linear as fp8_linear_ops
from deepinfer_nvidia_sm100.ops.few_rows import Tile, launch
from deepinfer_nvidia_sm100.ops.fp8_many_rows import ManyTile
from deepinfer_nvidia_sm100.ops.fp8_weight import Fp8Weight
from deepinfer_nvidia_sm100.ops.held_rows import HeldTile
from deepinfer_nvidia_sm100.ops.normed_rows import Add, Scale
from deepinfer_nvidia_sm100.ops.one_row import OneRowTile
from reference_support import batch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from deepinfer_core.api import (
    AppendTokensRequest,
    AttentionInputsRequest,
    BetweenAttentionRequest,
    BetweenWeights,
    EmbeddingRequest,
    GatedLinearRequest,
    InputIdsRequest,
    LinearRequest,
    OpRequest,
    PagedAttentionRequest,
    QuantisedWeight,
    RmsNormRequest,
    RopeRequest,
    SampleTokensRequest,
    SamplingRequest,
    SlotMappingRequest,
    StepLayout,
    SwigluRequest,
    WriteKVRequest,
)

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 32, 8, 128, 2560, 9728, 151936
MATRIX = re.compile(r"\b(tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*")
FP8 = re.compile(r"wgmma\.mma_async[\w.]*\.e4m3\.e4m3|tcgen05\.mma[\w.:]*kind::f8f6f4")


class NamedTarget:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(capability: int) -> list[Any]:
    """From now on launches compile; the kernels they need are collected."""
    triton.runtime.driver.set_active(NamedTarget(capability))
    compiled: list[Any] = []
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        compiled.append((self.__name__, kernel.result() if hasattr(kernel, "result") else kernel))
        return kernel

    JITFunction.run = run
    tables.architecture = lambda device: f"sm_{capability}"
    paged_attention._multiprocessors = lambda device: {90: 132, 100: 148, 103: 148}[
        capability
    ]  # contexts are split as there
    for name, module in list(sys.modules.items()):  # some have it under a name of their own by now
        if name.startswith("deepinfer_nvidia_sm100.ops.") and hasattr(module, "dependent"):
            module.dependent = lambda tensor: {"DEPENDENT": True, "launch_pdl": True}
    return compiled


def operator(request: OpRequest, name: str | None = None) -> Any:
    import gpu_support

    return gpu_support.operator(request, name)


def layout(counts: list[int], context: int) -> StepLayout:
    rows = sum(counts)
    return StepLayout(
        block_size=16,
        cu_seqlens=torch.zeros(len(counts) + 1, dtype=torch.int32),
        seq_lens=torch.zeros(len(counts), dtype=torch.int32),
        positions=torch.zeros(rows, dtype=torch.int64),
        block_table=torch.zeros((len(counts), 256), dtype=torch.int32),
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        host_query_lens=np.array(counts, np.int32),
        host_seq_lens=np.full(len(counts), context, np.int32),
        max_query_len=max(counts),
        max_seq_len=context,
    )


def attention(counts: list[int], context: int, **changes: Any) -> None:
    fields: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16", "cache_dtype": "bfloat16"}
    shape = fields | {"block_size": 16, "cache_group": "full"}
    request = PagedAttentionRequest(q_heads=HEADS, scale=DIM**-0.5, **(shape | changes))
    op, where = operator(request), layout(counts, context)
    dtype, kept = getattr(torch, request.dtype), getattr(torch, request.cache_dtype)
    cache = {n: torch.empty((4, 16, request.kv_heads, request.head_dim), dtype=kept) for n in ("key", "value")}
    query = torch.empty((sum(counts), HEADS, request.head_dim), dtype=dtype)
    op.run(query, cache, op.plan(where))


def linear(rows: int, out: int, inner: int, name: str = "linear", out_dtype: str = "bfloat16") -> None:
    request = LinearRequest(
        in_features=inner, out_features=out, dtype="bfloat16", out_dtype=out_dtype, weight_dtype="bfloat16"
    )
    op = operator(request, name)
    op.run(
        torch.empty((rows, inner), dtype=torch.bfloat16), op.prepare([torch.empty((out, inner), dtype=torch.bfloat16)])
    )


def fused() -> None:
    inputs = operator(
        AttentionInputsRequest(
            cache_group="full",
            q_heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            theta=1e6,
            max_positions=64,
            norm_eps=1e-6,
            dtype="bfloat16",
            cache_dtype="bfloat16",
            block_size=16,
        )
    )
    cache = {n: torch.empty((4, 16, KV_HEADS, DIM), dtype=torch.bfloat16) for n in ("key", "value")}
    qkv, weight = torch.empty((7, (HEADS + 2 * KV_HEADS) * DIM), dtype=torch.bfloat16), torch.empty(DIM)
    inputs.run(qkv, cache, inputs.plan(layout([7], 7)), weight, weight)


def gated(rows: int) -> None:
    op = operator(
        GatedLinearRequest(in_features=HIDDEN, width=INNER, dtype="bfloat16", weight_dtype="bfloat16"), "gated_linear"
    )
    weight = torch.empty((2 * INNER, HIDDEN), dtype=torch.bfloat16)
    op.run(torch.empty((rows, HIDDEN), dtype=torch.bfloat16), op.prepare([weight]))


def between(rows: int) -> None:
    """Products with norms at their ends, with tiles by rule and with those of descriptors."""
    request = BetweenAttentionRequest(
        hidden=HIDDEN,
        attended=HEADS * DIM,
        width=INNER,
        merged=(HEADS + 2 * KV_HEADS) * DIM,
        eps=1e-6,
        dtype="bfloat16",
        weight_dtype="bfloat16",
    )
    op = operator(request)
    half = torch.bfloat16
    weights = BetweenWeights(
        attention_out=op.prepare("attention_out", [torch.empty((HIDDEN, HEADS * DIM), dtype=half)]),
        norm=torch.empty(HIDDEN, dtype=half),
        gate_up=op.prepare("gate_up", [torch.empty((2 * INNER, HIDDEN), dtype=half)]),
        down=op.prepare("down", [torch.empty((HIDDEN, INNER), dtype=half)]),
        next_norm=torch.empty(HIDDEN, dtype=half),
        next_qkv=op.prepare("qkv", [torch.empty((request.merged, HIDDEN), dtype=half)]),
    )
    op.run(torch.empty((rows, HEADS * DIM), dtype=half), torch.empty((rows, HIDDEN), dtype=half), weights)


def between_by_descriptors() -> None:
    x, out = torch.empty((64, HIDDEN), dtype=torch.bfloat16), torch.empty((64, HIDDEN), dtype=torch.bfloat16)
    squares, arrived = torch.empty((40, 64)), torch.zeros(1, dtype=torch.int32)
    weight = torch.empty((HIDDEN, HIDDEN), dtype=torch.bfloat16)
    tile = Tile(block_n=64, block_m=64, block_k=128, splits=2, stages=4, warps=4, described=True)
    launch(x, weight, None, out, tile, arrived, add=Add(out, out[0], squares))
    launch(x, weight, None, out, tile, arrived, scale=Scale(squares, 40, 1e-6))
    gate = Tile(block_n=128, block_m=64, block_k=64, splits=1, stages=4, warps=4, described=True)
    launch(x, weight, None, out, gate, arrived, gated=True, scale=Scale(squares, 40, 1e-6))


def held(rows: int) -> None:
    """The weight straight in registers, with every end that a product can have."""
    x, out = torch.empty((rows, HIDDEN), dtype=torch.bfloat16), torch.empty((rows, 2 * INNER), dtype=torch.bfloat16)
    weight, arrived = torch.empty((2 * INNER, HIDDEN), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    whole = HeldTile(block_n=8, warps=4, held=10, splits=1, ahead=3)
    launch(x, weight, None, out, whole, arrived)
    launch(x, weight, None, out, attrs.evolve(whole, splits=2), arrived)
    launch(x, weight, None, out, HeldTile(block_n=16, warps=4, held=10, splits=1, ahead=2), arrived)
    squares = torch.empty((320, rows))
    launch(x, weight, None, out, whole, arrived, gated=True, scale=Scale(squares, 320, 1e-6))
    launch(x, weight, None, out, whole, arrived, add=Add(out, out[0], squares))


def one_row() -> None:
    """Without the matrix unit, with every end that a product can have."""
    x, out = torch.empty((1, HIDDEN), dtype=torch.bfloat16), torch.empty((1, 2 * INNER), dtype=torch.bfloat16)
    weight, arrived = torch.empty((2 * INNER, HIDDEN), dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    squares = torch.empty((640, 1))
    for tile in (
        OneRowTile(block_n=2, block_k=512, splits=1, warps=2),
        OneRowTile(block_n=4, block_k=1024, splits=1, warps=4),
        OneRowTile(block_n=4, block_k=256, splits=2, warps=2),
    ):
        launch(x, weight, None, out, tile, arrived)
        launch(x, weight, None, out, tile, arrived, gated=True, scale=Scale(squares, 640, 1e-6))
        launch(x, weight, None, out, tile, arrived, add=Add(out, out[0], squares))


def fp8_linear(rows: int, out: int, inner: int, activations: str = "") -> None:
    stored = "fp8:e4m3:128x128"
    request = LinearRequest(
        in_features=inner,
        out_features=out,
        dtype="bfloat16",
        out_dtype="bfloat16",
        weight_dtype=stored,
        activations=activations,
    )
    op = operator(request)
    weight = QuantisedWeight(
        format="fp8:e4m3",
        data=torch.empty((out, inner), dtype=torch.float8_e4m3fn),
        scale=torch.full((-(-out // 128), inner // 128), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        block=(128, 128),
    )
    op.run(torch.zeros((rows, inner), dtype=torch.bfloat16), op.prepare([weight]))


def by_roles() -> None:
    """Products of many rounded rows by warps with one task each, which are for 9.0 alone."""
    x, weight = (torch.empty((rows, 4096), dtype=torch.float8_e4m3fn) for rows in (4096, 7168))
    packed = Fp8Weight(weight, torch.empty((7168 // 128, 32)), 128, None)
    for tile in HOPPER:
        fp8_linear_ops.multiply_many(
            x, torch.empty((32, 4096)), packed, torch.empty((4096, 7168), dtype=torch.bfloat16), tile
        )


def by_tiles() -> None:
    """The same by warps that share all tasks, for either generation: what serves where nothing faster was measured."""
    x, weight = (torch.empty((rows, 4096), dtype=torch.float8_e4m3fn) for rows in (4096, 7168))
    packed = Fp8Weight(weight, torch.empty((7168 // 128, 32)), 128, None)
    tile = ManyTile(block_m=128, block_n=128, halves=1, stages=4, warps=8, box=True, prefetch=False)
    fp8_linear_ops.multiply_many(
        x, torch.empty((32, 4096)), packed, torch.empty((4096, 7168), dtype=torch.bfloat16), tile
    )


def fp8_write() -> None:
    shape = {"cache_group": "full", "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": 16}
    write = operator(WriteKVRequest(dtype="bfloat16", cache_dtype="float8_e4m3fn", **shape))
    cache = {n: torch.empty((4, 16, KV_HEADS, DIM), dtype=torch.float8_e4m3fn) for n in ("key", "value")}
    new = torch.empty((7, KV_HEADS, DIM), dtype=torch.bfloat16)
    write.run(new, new, cache, layout([7], 7))


def by_descriptors(gated: bool) -> None:
    """Tensor descriptors, whatever the architecture's table says."""
    x = torch.empty((24, HIDDEN), dtype=torch.bfloat16)
    weight = torch.empty((2 * INNER, HIDDEN), dtype=torch.bfloat16)
    arrived = torch.zeros(1, dtype=torch.int32)
    for splits in (1,) if gated else (1, 2):
        tile = Tile(block_n=128, block_m=32, block_k=128, splits=splits, stages=4, warps=4, described=True)
        launch(x, weight, None, torch.empty((24, INNER if gated else 2 * INNER)), tile, arrived, gated=gated)


def pointwise() -> None:
    x = torch.empty((7, HIDDEN), dtype=torch.bfloat16)
    norm = operator(RmsNormRequest(hidden=HIDDEN, eps=1e-6, dtype="bfloat16"))
    norm.run(x, x[0])
    norm.add(x, x.clone(), x[0])
    qkv = torch.empty((7, HEADS + 2 * KV_HEADS, DIM), dtype=torch.bfloat16)
    operator(RmsNormRequest(hidden=DIM, eps=1e-6, dtype="bfloat16")).run(qkv[:, :HEADS], qkv[0, 0])
    rope = operator(RopeRequest(head_dim=DIM, rotary_dim=DIM, theta=1e6, dtype="bfloat16", max_positions=64))
    for heads in (HEADS, KV_HEADS):
        rope.run(torch.empty((7, heads, DIM), dtype=torch.bfloat16), torch.zeros(7, dtype=torch.int64))
    operator(SwigluRequest(width=INNER, dtype="bfloat16")).run(torch.empty((7, 2 * INNER), dtype=torch.bfloat16))
    embedding = operator(EmbeddingRequest(vocab_size=100, hidden=HIDDEN, dtype="bfloat16", weight_dtype="bfloat16"))
    embedding.run(torch.zeros(7, dtype=torch.int64), torch.empty((100, HIDDEN), dtype=torch.bfloat16))
    write = operator(
        WriteKVRequest(
            cache_group="full",
            kv_heads=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
            cache_dtype="bfloat16",
            block_size=16,
        )
    )
    cache = {n: torch.empty((4, 16, KV_HEADS, DIM), dtype=torch.bfloat16) for n in ("key", "value")}
    write.run(qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:], cache, layout([7], 7))


def sampling() -> None:
    rows = [{"prompt": [1], "output": [2], "frequency": 0.5, "allowed": [3], "bias": {1: 2.0}, "bad_words": [[1, 2]]}]
    step = batch(rows, VOCAB)
    for stage in ("mask", "bias", "penalties", "temperature", "min_p", "top_k", "top_p", "draw"):
        operator(SamplingRequest(stage=stage, vocab_size=VOCAB)).run(torch.zeros((1, VOCAB)), step)
    temperature.MANY = 1  # from here on as with many rows
    for stage in ("temperature", "min_p"):
        operator(SamplingRequest(stage=stage, vocab_size=VOCAB)).run(torch.zeros((1, VOCAB)), step)
    step.active = frozenset({"temperature", "top_k", "top_p"})
    chain.LEVELLED = 1
    operator(SampleTokensRequest(vocab_size=VOCAB)).run(torch.zeros((1, VOCAB)), step)
    chosen = operator(SamplingRequest(stage="logprobs", vocab_size=VOCAB))
    chosen.run(torch.zeros((1, VOCAB)), torch.zeros(1, dtype=torch.int64), 0)
    slots, history = torch.zeros(3, dtype=torch.int64), torch.zeros((4, 64), dtype=torch.int32)
    operator(InputIdsRequest()).run(history, slots, slots)
    operator(SlotMappingRequest(block_size=16)).run(history, slots, slots)
    operator(AppendTokensRequest()).run(history, slots, slots, slots)


INVARIANT = frozenset({"batch_invariant"})
ROUNDED = "fp8:e4m3:128"
CASES: dict[str, Callable[[], None]] = {
    "pointwise": pointwise,
    "fused": fused,
    "gated 1 row": lambda: gated(1),
    "gated 24 rows": lambda: gated(24),
    "between 1 row": lambda: between(1),
    "between 64 rows": lambda: between(64),
    "between by descriptors": between_by_descriptors,
    "described rows": lambda: by_descriptors(False),
    "described gate": lambda: by_descriptors(True),
    "sampling": sampling,
    "decode": lambda: attention([1] * 7, 4000),
    "decode many": lambda: attention([1] * 300, 4000),
    "decode float32": lambda: attention([1] * 7, 4000, dtype="float32", cache_dtype="float32"),
    "decode drafts": lambda: attention([4] * 3, 4000),
    "decode window": lambda: attention([1] * 7, 4000, window=1024),
    "prompt": lambda: attention([1, 2000], 2000),
    "prompt float32": lambda: attention([2000], 2000, dtype="float32", cache_dtype="float32"),
    "prompt head_dim 256": lambda: attention([2000], 2000, head_dim=256),
    "prompt head_dim 64": lambda: attention([2000], 2000, head_dim=64),
    "fixed decode": lambda: attention([1] * 300, 600, demands=INVARIANT),
    "fixed chunks": lambda: attention([1, 2000], 2000, demands=INVARIANT),
    "linear 1 row": lambda: linear(1, HIDDEN, INNER),
    "linear 24 rows": lambda: linear(24, 6144, HIDDEN),
    "linear 64 rows": lambda: linear(64, 6144, HIDDEN),
    "linear logits": lambda: linear(1, VOCAB, HIDDEN, out_dtype="float32"),
    "one row in registers": one_row,
    "held 1 row": lambda: held(1),
    "held 16 rows": lambda: held(16),
    "fp8 1 row": lambda: fp8_linear(1, 7168, 4096),
    "fp8 64 rows": lambda: fp8_linear(64, 7168, 4096),
    "fp8 widened": lambda: fp8_linear(4096, 7168, 4096),
    "fp8 rounded 1 row": lambda: fp8_linear(1, 7168, 4096, ROUNDED),
    "fp8 rounded 64 rows": lambda: fp8_linear(64, 7168, 4096, ROUNDED),
    "fp8 rounded 4096 rows": lambda: fp8_linear(4096, 7168, 4096, ROUNDED),
    "fp8 rounded by roles": by_roles,
    "fp8 rounded by tiles": by_tiles,
    "fp8 cache write": fp8_write,
    "fp8 cache decode": lambda: attention([1] * 7, 4000, cache_dtype="float8_e4m3fn"),
    "fp8 cache prompt": lambda: attention([1, 2000], 2000, cache_dtype="float8_e4m3fn"),
    "linear fixed tile": lambda: linear(300, HIDDEN, INNER, "fixed_order_linear"),
}


def described(name: str, kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name,
        "shared": kernel.metadata.shared,
        "tensor_memory": getattr(kernel.metadata, "tmem_size", 0) or 0,
        "warps": kernel.metadata.num_warps,
        "matrix": sorted({match.group(1) for match in MATRIX.finditer(ptx)}),
        "fp8": FP8.search(ptx) is not None,
        **resources(kernel.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: where values went that found no register."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", done.stdout + done.stderr))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def compiled_for(capability: int, case: str) -> Iterator[dict[str, Any]]:
    collected = compile_only(capability)
    CASES[case]()
    seen = set()
    for name, kernel in collected:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            yield described(name, kernel)


def main() -> None:
    capability, case = int(sys.argv[1]), sys.argv[2]
    for line in compiled_for(capability, case):
        print(json.dumps({"capability": capability, "case": case} | line), flush=True)


if __name__ == "__main__":
    main()
