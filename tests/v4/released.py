"""Writes a random model in the layout of the released checkpoints: FP8 blocks, FP4 experts, names, config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from v4.support import HCA_RATE, random_model

GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DIMENSIONS: Mapping[str, Any] = {
    "hidden_size": 160,
    "head_dim": 80,
    "partial_rotary_factor": 0.2,
    "index_head_dim": 32,
    "moe_intermediate_size": 64,
    "o_lora_rank": 32,
    "q_lora_rank": 40,
}
"""Rounding of cached values needs 64 unrotated channels, FP4 rows of 32; 160 makes FP8 blocks that are not whole."""

FP8_ENDS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj", "main_proj")


def released_tensors(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors of a random model under released names, by way of what transformers saves."""
    random_model(seed, **DIMENSIONS).save_pretrained(directory)
    found = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        found[name.replace("attn.norm.weight", "attn.kv_norm.weight")] = tensor
    return found


def fp8_pack(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 data and e8m0 scales by blocks; an all-zero block gets a finite scale."""
    rows, columns = (-(-n // block) for n in weight.shape)
    data = torch.empty_like(weight)
    scale = torch.empty(rows, columns, dtype=torch.uint8)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            exponent = _exponent(float(weight[at].abs().max()), 448.0)
            scale[i, j] = exponent + 127
            data[at] = weight[at] / 2.0**exponent
    return data.clamp(-448, 448).to(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def fp4_pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes and one e8m0 scale for 32 columns."""
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = torch.tensor([[_exponent(float(g.abs().max()), 6.0) for g in row] for row in groups])
    scaled = groups / 2.0 ** exponents[:, :, None]
    codes = (scaled.abs()[..., None] - GRID).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.view(weight.shape).to(torch.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
    return packed, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _exponent(largest: float, most: float) -> int:
    return max(-127, int(torch.tensor(max(largest, 1e-12) / most).log2().ceil()))


def unpack(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What packed tensors stand for, in float64 and element by element."""
    powers = 2.0 ** (scale.view(torch.uint8).double() - 127)
    if data.dtype == torch.int8:
        byte = data.view(torch.uint8).long()
        codes = torch.stack((byte & 15, byte >> 4), -1).flatten(1)
        values = GRID.double()[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        return values * powers.repeat_interleave(32, 1)
    rows, columns = data.shape
    return data.double() * powers[torch.arange(rows) // 128][:, torch.arange(columns) // 128]


def pack_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor as the released checkpoints store it: experts FP4, projections FP8, the rest bf16, f32 or int64."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        if last == "weight" and ".experts." in name:
            packed[name], packed[f"{owner}.scale"] = fp4_pack(tensor)
        elif last == "weight" and owner.rpartition(".")[2] in FP8_ENDS and "compressor" not in name:
            packed[name], packed[f"{owner}.scale"] = fp8_pack(tensor)
        elif tensor.dtype == torch.int64 or "hc_" in name or last in ("attn_sink", "bias", "ape"):
            packed[name] = tensor
        else:
            packed[name] = tensor.to(torch.bfloat16)
    return packed


def unpack_all(packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model in float32."""
    plain = {}
    for name, tensor in packed.items():
        if name.endswith(".scale"):
            continue
        scale = packed.get(f"{name.rpartition('.')[0]}.scale")
        whole = tensor if scale is None else unpack(tensor, scale)
        plain[name] = whole if tensor.dtype == torch.int64 else whole.to(torch.float32)
    return plain


def released_config(drafts: int = 0, **more: Any) -> dict[str, Any]:
    """config.json in the released spelling."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 16,
        "sliding_window": 8,
        "compress_ratios": [0, 4, HCA_RATE, 4, *([0] * drafts)],
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 4096,
        "index_n_heads": 16,
        "index_topk": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_hash_layers": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "o_groups": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
        "expert_dtype": "fp4",
        "num_nextn_predict_layers": 1,
    }
    fields = {k: v for k, v in DIMENSIONS.items() if k != "partial_rotary_factor"}
    return config | fields | more


def write(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], shards: int = 1) -> Path:
    """Safetensors in ``shards`` files, with an index when there are several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name].contiguous() for name in mine}, directory / file)
        files |= dict.fromkeys(mine, file)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory
