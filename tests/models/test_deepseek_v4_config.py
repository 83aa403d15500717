"""config.json and tensor names in both spellings, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from safetensors import safe_open
from v4.released import DIMENSIONS, released_config
from v4.support import tiny_config

from deepinfer_core.api import CheckpointError, ConfigError, ModelOptions
from deepinfer_core.models.deepseek_v4.config import V4Config
from deepinfer_core.models.deepseek_v4.model import DeepseekV4Model
from deepinfer_core.models.deepseek_v4.names import released_name, stored_names
from deepinfer_core.models.deepseek_v4.tensors import main_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_v4"
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "expert_dtype": "fp4",
    "num_nextn_predict_layers": 1,
}
"""The released DeepSeek-V4-Flash, April 2026."""
DSPARK = FLASH | {
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def options(**changes: Any) -> ModelOptions:
    fields: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": None, "block_size": 128, "device_type": "cpu"}
    return ModelOptions(**(fields | changes))


def test_the_released_config() -> None:
    c = V4Config.read(FLASH)
    assert [c.kinds.count(kind) for kind in ("window", "csa", "hca")] == [2, 21, 20]
    assert (c.kinds[2], c.kinds[3], c.kinds[42]) == ("csa", "hca", "csa")
    assert (c.hca_rate, c.block_alignment, c.rotary_dim) == (128, 128, 64)
    assert c.hashed == (True,) * 3 + (False,) * 40
    assert (c.rope_window.theta, c.rope_compressed.theta) == (1e4, 1.6e5)
    assert c.rope_window.scaling == {}
    assert c.rope_compressed.scaling["attention_factor"] == 1.0
    assert (c.drafts, c.draft_kind, c.quantised) == (1, "mtp", True)


def test_draft_stages_are_counted_by_the_ratios() -> None:
    """The second release still says one next-token layer, and has three stages."""
    c = V4Config.read(DSPARK)
    assert (c.drafts, c.draft_kind) == (3, "dspark")
    assert c.dspark is not None
    assert c.dspark.target_layers == (40, 41, 42)


def test_both_spellings_say_the_same() -> None:
    ours = V4Config.read(released_config())
    saved = V4Config.read(tiny_config(**DIMENSIONS).to_dict())
    ignored = {"quantised", "rope_compressed"}
    for field in attrs.fields(V4Config):
        if field.name not in ignored:
            assert getattr(ours, field.name) == getattr(saved, field.name), field.name
    left, right = ours.rope_compressed, saved.rope_compressed
    assert left.theta == right.theta
    assert {k: float(v) for k, v in left.scaling.items() if k != "rope_type"} == {
        k: float(v) for k, v in right.scaling.items() if k != "rope_type"
    }


def test_the_released_model_needs_what_it_should() -> None:
    spec = DeepseekV4Model.describe(FLASH, options())
    assert spec.block_alignment == 128
    groups = {g.name: g for g in spec.cache_groups}
    assert {name: (g.layers, g.window, g.tokens_per_row) for name, g in groups.items()} == {
        "window": (43, 128, 1),
        "csa": (21, None, 4),
        "csa_tail": (21, 8, 1),
        "index": (21, None, 4),
        "index_tail": (21, 8, 1),
        "hca": (20, None, 128),
        "hca_tail": (20, 128, 1),
    }
    assert len(spec.tensors) == len(dict(main_tensors(V4Config.read(FLASH))))


def test_names_transformers_saves_become_the_released_ones() -> None:
    """Every tensor of a saved model is read, under exactly one released name."""
    import json

    config = V4Config.read(json.loads((GOLDEN / "config.json").read_text()))
    with safe_open(GOLDEN / "model.safetensors", "np") as file:
        stored = set(file.keys())
    expected = {name for name, _ in main_tensors(config)}
    assert set(stored_names(stored)) == expected


@pytest.mark.parametrize(
    ("stored", "released"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("embed.weight", "embed.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("hc_head_scale", "hc_head_scale"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("layers.3.attn_norm.weight", "layers.3.attn_norm.weight"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"),
        ("mtp.0.norm.weight", "mtp.0.norm.weight"),
    ],
)
def test_names(stored: str, released: str) -> None:
    assert released_name(stored) == released


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'embed\.weight' and 'model\.embed_tokens\.weight' are both"):
        stored_names(["embed.weight", "model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"scoring_func": "relu"}, "scoring_func='relu'"),
        ({"o_groups": 3}, "o_groups=3: expected a divisor of num_attention_heads=4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9: expected at most n_routed_experts=8"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios=\[0, 4\]: expected at least 4 integers"),
        ({"compress_ratios": [0, 4, 8, 16]}, r"compress_ratios has \[8, 16\]: expected one"),
        ({"compress_ratios": [0, 4, 16, 4, 4]}, r"expected 0 from entry 4 on \(draft stages\)"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 4}, r"layer_types=\['full_attention'"),
        ({"num_hash_layers": -1}, "num_hash_layers=-1"),
        ({"mlp_layer_types": ["moe"]}, r"mlp_layer_types=\['moe'\]: expected 4"),
        ({"qk_rope_head_dim": 15}, "15 rotary channels: expected an even number up to head_dim=80"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type='linear'"),
        ({"quantization_config": {"weight_block_size": [128]}}, r"weight_block_size=\[128\]"),
        ({"hc_eps": 0}, "hc_eps=0: expected a number > 0"),
        ({"head_dim": None}, "head_dim=None: expected an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected at most 10000"),
        (
            {"compress_ratios": [0, 4, 16, 4, 0], "dspark_block_size": 5, "dspark_target_layer_ids": [4]},
            r"dspark_target_layer_ids=\[4\]: expected layer numbers below 4",
        ),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        V4Config.read(released_config(**changes))
