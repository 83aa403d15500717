"""One layer of the released dimensions: 256 FP4 experts, 3.2 GB, loaded and run with the experts still packed."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from v4.released import unpack, write
from v4.support import Stepper, random_tokens

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.models.deepseek_v4.config import V4Config
from deepinfer_core.models.deepseek_v4.tensors import main_tensors

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [4],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "expert_dtype": "fp4",
}
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
MOST_MEMORY = 8 << 30
BLOCKS: dict[str, Any] = {"kv_cache.block_size": 128}


def random_bytes(*shape: int) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return torch.frombuffer(bytearray(random.randbytes(count)), dtype=torch.uint8).view(*shape)


def scales(rows: int, columns: int, middle: int) -> torch.Tensor:
    return (middle + random_bytes(rows, columns) % 3).view(torch.float8_e8m0fnu)


def layer_tensors() -> dict[str, torch.Tensor]:
    """Random numbers of a sane size in the formats of the release."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in main_tensors(V4Config.read(CONFIG)):
        owner, _, last = name.rpartition(".")
        if last == "weight" and ".experts." in name:
            found[name] = random_bytes(shape[0], shape[1] // 2).view(torch.int8)
            found[f"{owner}.scale"] = scales(shape[0], shape[1] // 32, 119)
        elif last == "weight" and owner.rpartition(".")[2] in FP8 and "compressor" not in name:
            values = torch.randn(shape) * 64
            found[name] = values.to(torch.float8_e4m3fn)
            found[f"{owner}.scale"] = scales(-(-shape[0] // 128), -(-shape[1] // 128), 114)
        elif last == "weight":
            norm = len(shape) == 1
            found[name] = (torch.ones(shape) if norm else torch.randn(shape) * shape[-1] ** -0.5).bfloat16()
        else:
            found[name] = torch.randn(shape) * (0.02 if "fn" in name else 0.5)
    return found


def anonymous_memory() -> int:
    """Bytes of this process that are not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@pytest.mark.slow
def test_one_released_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = layer_tensors()
    stored = sum(t.numel() * t.element_size() for name, t in tensors.items() if ".experts." in name)
    assert 3.1e9 < stored < 3.5e9
    path = write(tmp_path, tensors, CONFIG, shards=4)
    del tensors
    started = time.perf_counter()
    stepper = Stepper(path, length=256, requests=1, **BLOCKS)
    loaded = time.perf_counter()
    tokens = random_tokens(1, 9)
    prefill = stepper.step([(0, tokens[:8], 0)])
    ran = time.perf_counter()
    decode = stepper.step([(0, tokens[8:], 8)])
    done = time.perf_counter()
    used = anonymous_memory()
    with capsys.disabled():
        print(
            f"\nreleased layer: experts {stored / 1e9:.2f} GB, loaded in {loaded - started:.1f} s, 8 tokens in "
            f"{ran - loaded:.1f} s, 1 more in {done - ran:.1f} s, {used / 1e9:.2f} GB beside the mapped file"
        )
    assert prefill.isfinite().all()
    assert decode.isfinite().all()
    assert used < MOST_MEMORY
    check_experts(stepper, path)
    shutil.rmtree(tmp_path)


def check_experts(stepper: Stepper, path: Path) -> None:
    """The layer's experts on one row, against weights decoded independently and multiplied in float64."""
    experts = stepper.model.blocks[0].experts
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = experts.run(x, torch.zeros(1, dtype=torch.int64))
        logits = stepper.ops.router.run(x, experts.router)
        ids, weights = stepper.ops.route.run(logits, experts.bias)
    wanted = torch.zeros(4096, dtype=torch.float64)
    with open_checkpoint(path) as checkpoint:

        def weight(name: str) -> torch.Tensor:
            data = checkpoint.weights.load(f"layers.0.ffn.{name}.weight")
            return unpack(data, checkpoint.weights.load(f"layers.0.ffn.{name}.scale"))

        chosen = [(f"experts.{e}", float(w)) for e, w in zip(ids[0].tolist(), weights[0].tolist(), strict=True)]
        for owner, share in [*chosen, ("shared_experts", 1.0)]:
            gate, up = weight(f"{owner}.w1") @ x[0].double(), weight(f"{owner}.w3") @ x[0].double()
            inner = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
            wanted += weight(f"{owner}.w2") @ inner * share
    assert torch.allclose(found[0].double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
