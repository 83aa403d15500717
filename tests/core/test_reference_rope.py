"""Rotary embedding of the reference backend, against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import operator
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from deepinfer_core.api import ConfigError, RopeRequest

DIM, MAX_POSITIONS, THETA = 64, 4096, 10000.0

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn_betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "truncate": False,
    },
    "yarn_given_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 0.8,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn_narrow": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 6},
}


def rope(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "head_dim": DIM,
        "rotary_dim": DIM,
        "theta": THETA,
        "dtype": "float32",
        "max_positions": MAX_POSITIONS,
    }
    return operator(RopeRequest(**(fields | changes)))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


POSITIONS = torch.tensor([0, 1, 2, 17, 255, 256, 1000, 4095])


def transformers_rope(
    x: torch.Tensor, positions: torch.Tensor, scaling: dict[str, Any], theta: float = THETA
) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=DIM * 2,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": theta, **scaling},
    )
    heads = x.transpose(0, 1)[None]
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    turned, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    result: torch.Tensor = turned[0].transpose(0, 1)
    return result


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_equals_transformers(name: str) -> None:
    x = random(len(POSITIONS), 3, DIM)
    op = rope(scaling=SCALINGS[name])
    expected = transformers_rope(x, POSITIONS, SCALINGS[name])
    torch.testing.assert_close(op.run(x, op.plan(POSITIONS)), expected, rtol=1e-5, atol=1e-5)


def test_yarn_ramp_may_end_beyond_the_last_channel() -> None:
    """With a small base even the slowest channel turns often."""
    x = random(len(POSITIONS), 3, DIM)
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1000}
    op = rope(scaling=scaling, theta=10.0)
    # Angles reach thousands of turns here: their float32 rounding alone moves the result by up to 1e-3.
    expected = transformers_rope(x, POSITIONS, scaling, theta=10.0)
    torch.testing.assert_close(op.run(x, op.plan(POSITIONS)), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", [name for name in sorted(SCALINGS) if name != "default"])
def test_each_scaling_changes_something(name: str) -> None:
    x = random(len(POSITIONS), 3, DIM)
    op, plain = rope(scaling=SCALINGS[name]), rope()
    assert not torch.allclose(op.run(x, op.plan(POSITIONS)), plain.run(x, plain.plan(POSITIONS)), atol=1e-3)


def test_old_spelling_of_the_type_is_understood() -> None:
    new, old = rope(scaling={"rope_type": "linear", "factor": 2.0}), rope(scaling={"type": "linear", "factor": 2.0})
    x = random(2, 1, DIM)
    positions = torch.tensor([3, 9])
    assert torch.equal(new.run(x, new.plan(positions)), old.run(x, old.plan(positions)))


def test_interleaved_is_half_split_on_permuted_channels() -> None:
    x = random(len(POSITIONS), 3, DIM)
    op, half = rope(interleaved=True), rope()
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    turned = half.run(apart, half.plan(POSITIONS))
    expected = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
    assert torch.equal(op.run(x, op.plan(POSITIONS)), expected)


def test_interleaved_equals_complex_multiplication() -> None:
    x = random(len(POSITIONS), 3, DIM).double()
    op = rope(interleaved=True, dtype="float64")
    inverse = THETA ** (-torch.arange(0, DIM, 2).double() / DIM)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), POSITIONS[:, None].double() * inverse)[:, None]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    expected = torch.view_as_real(pairs * turn).flatten(-2)
    # Angles are float32, as in Hugging Face: at position 4095 they are off by up to 2^-13.
    torch.testing.assert_close(op.run(x, op.plan(POSITIONS)), expected, rtol=0, atol=2e-3)
    early = POSITIONS < 20
    result = op.run(x[early], op.plan(POSITIONS[early]))
    torch.testing.assert_close(result, expected[early], rtol=0, atol=1e-5)


def test_channels_beyond_rotary_dim_pass_through() -> None:
    x = random(len(POSITIONS), 2, DIM)
    op, small = rope(rotary_dim=16), rope(head_dim=16, rotary_dim=16)
    result = op.run(x, op.plan(POSITIONS))
    assert torch.equal(result[..., 16:], x[..., 16:])
    assert torch.equal(result[..., :16], small.run(x[..., :16], small.plan(POSITIONS)))


def test_position_zero_changes_nothing() -> None:
    x = random(1, 2, DIM)
    op = rope()
    assert torch.equal(op.run(x, op.plan(torch.tensor([0]))), x)


def test_bfloat16_rounds_only_the_result() -> None:
    x = random(len(POSITIONS), 2, DIM).bfloat16()
    op = rope(dtype="bfloat16")
    assert torch.equal(op.run(x, op.plan(POSITIONS)), op.run(x.float(), op.plan(POSITIONS)).bfloat16())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = random(len(POSITIONS), 2, DIM)
    op = rope()
    together = op.run(x, op.plan(POSITIONS))
    for row, position in enumerate(POSITIONS):
        alone = op.run(x[row : row + 1], op.plan(position[None]))
        assert torch.equal(alone[0], together[row])


def test_input_is_left_alone() -> None:
    x = random(2, 2, DIM)
    before = x.clone()
    op = rope()
    op.run(x, op.plan(torch.tensor([5, 6])))
    assert torch.equal(x, before)


def test_no_rows() -> None:
    op = rope()
    none = torch.zeros(0, dtype=torch.int64)
    assert op.run(torch.zeros(0, 2, DIM), op.plan(none)).shape == (0, 2, DIM)


@pytest.mark.parametrize(("kind", "field"), [("linear", "factor"), ("yarn", "original_max_position_embeddings")])
def test_a_missing_field_is_named(kind: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"rope_scaling\.{field}"):
        rope(scaling={"rope_type": kind})
