"""A cache in FP8: written as the reference writes it, and read as its numbers say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from gpu_support import DTYPES, ON_GPU, here, operator, same_bits
from reference_support import layout
from reference_support import operator as reference
from test_nvidia_attention import STEPS, attend, request
from test_nvidia_engine import BACKEND, dense, prompt_differences, run
from test_reference_attention import BLOCK, DIM, KV_HEADS, Q_HEADS, Scene

from deepinfer_core import SamplingParams
from deepinfer_core.api import WriteKVRequest

KEPT = torch.float8_e4m3fn
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_written_as_the_reference_writes_them(dtype: str) -> None:
    """Bit by bit: everything from the smallest subnormal to what is past the largest, NaN and infinity too."""
    where, blocks = layout([9, 1], [30, 7], BLOCK)
    kind = getattr(torch, dtype)
    wanted = WriteKVRequest(
        cache_group="full", kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, cache_dtype="float8_e4m3fn", block_size=BLOCK
    )
    draw = torch.Generator().manual_seed(random.getrandbits(31))
    scale = 10.0 ** torch.linspace(-5, 4, 10)[:, None, None]
    key, value = ((torch.randn(10, KV_HEADS, DIM, generator=draw) * scale).to(kind) for _ in range(2))
    key[0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")]).to(kind)
    grid = torch.arange(127, dtype=torch.uint8).view(KEPT).to(torch.float32)
    value.view(-1)[:126] = ((grid[1:] + grid[:-1]) / 2).to(kind)  # ties
    caches: list[dict[str, torch.Tensor]] = []
    for op, put in ((operator(wanted), here), (reference(wanted), lambda x: x)):
        cache = {n: put(torch.full((blocks, BLOCK, KV_HEADS, DIM), 3.0).to(KEPT)) for n in ("key", "value")}
        op.run(put(key), put(value), cache, put(where))
        caches.append({n: t.cpu().view(torch.uint8) for n, t in cache.items()})
    for name in ("key", "value"):
        found, expected = (c[name].view(KEPT).to(torch.float32) for c in caches)
        assert torch.equal(found.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    assert bool(caches[0]["key"].view(KEPT).to(torch.float32).isnan().any())


def kept(scene: Scene) -> tuple[Scene, Scene]:
    """The scene with its cache in FP8, and one with that cache's numbers in float64, for the formula."""
    narrow = {n: t.float().clamp(-448, 448).to(KEPT) for n, t in scene.cache.items()}
    exact: Any = object.__new__(Scene)
    exact.__dict__.update(scene.__dict__)
    exact.keys = [k.to(KEPT).to(k.dtype) for k in scene.keys]
    exact.values = [v.to(KEPT).to(v.dtype) for v in scene.values]
    scene.cache = narrow
    return scene, exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["decode rows", "a long context", "drafts", "one prompt", "decode rows before chunks"])
def test_attention_equals_the_formula_on_what_is_kept(name: str, dtype: str) -> None:
    scene, exact = kept(Scene(*STEPS[name], dtype=getattr(torch, dtype)))
    wanted = attrs.evolve(request(dtype), cache_dtype="float8_e4m3fn")
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attend(scene, wanted), exact.formula(), rtol=tolerance, atol=tolerance)
    windowed = attrs.evolve(wanted, window=5)
    torch.testing.assert_close(attend(scene, windowed), exact.formula(window=5), rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    dtype = DTYPES[-1]
    scene, _ = kept(Scene([1, 20, 1], [90, 61, 7], dtype=getattr(torch, dtype)))
    wanted = attrs.evolve(
        request(dtype), cache_dtype="float8_e4m3fn", demands=frozenset({"batch_invariant", "kv_layout:paged"})
    )
    together = attend(scene, wanted)
    op = operator(wanted)
    alone = attrs.evolve(
        scene.layout,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=scene.layout.seq_lens[:1],
        positions=scene.layout.positions[:1],
        block_table=scene.layout.block_table[:1],
        slot_mapping=scene.layout.slot_mapping[:1],
        host_query_lens=scene.layout.host_query_lens[:1],
        host_seq_lens=scene.layout.host_seq_lens[:1],
        max_query_len=1,
        max_seq_len=90,
    )
    where = here(alone)
    found = op.run(here(scene.query[:1]), here(scene.cache), op.plan(where), None).cpu().double()
    assert found.shape == (1, Q_HEADS, DIM)
    same_bits(found, together[:1])


def test_a_model_computes_what_the_host_computes(tmp_path: Path) -> None:
    """With keys and values in FP8 on both; at a near tie of the format the two may keep different numbers."""
    model = dense("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.float().save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    (host, _), (device, plan) = (run(tmp_path, backend, params, kv_cache__dtype="fp8") for backend in ("cpu", BACKEND))
    differences = prompt_differences(host, device)
    assert differences[len(differences) // 2] < 1e-4
    assert differences[-1] < 0.1
    chosen = {c["op"]: c["provider"] for c in plan["plan"]["choices"]}
    plugin = BACKEND if ON_GPU else "interpreted_gpu"
    assert chosen["attention.paged"] == f"{plugin}:paged_attention"
    assert chosen["fused.attention_inputs"] == f"{plugin}:attention_inputs"
