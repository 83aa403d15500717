"""The reference's regions against formulas written out in float64."""

from __future__ import annotations

import pytest
import torch
from reference_support import layout, operator

from deepinfer_core.api import AttentionInputsRequest, BetweenAttentionRequest, BetweenWeights, GatedLinearRequest

HEADS, KV_HEADS, DIM, EPS, THETA = 6, 2, 8, 1e-5, 500.0


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([row / ((row @ row) / DIM + EPS) ** 0.5 * weight for row in x.view(-1, DIM)]).view_as(x)


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """``[heads, DIM]``: channel i and i + DIM / 2 are one complex number, turned by the position's angle."""
    half = DIM // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angles = position * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat((turned.real, turned.imag), 1)


@pytest.mark.parametrize("norm", [True, False])
def test_attention_inputs(norm: bool) -> None:
    request = AttentionInputsRequest(
        cache_group="full",
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        theta=THETA,
        max_positions=40,
        norm_eps=EPS if norm else None,
        dtype="float64",
        cache_dtype="float64",
        block_size=4,
    )
    op = operator(request)
    where, blocks = layout([1, 3, 2], [9, 3, 31], 4)
    qkv = torch.randn(6, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.float64)
    weights = [torch.randn(DIM, dtype=torch.float64) for _ in range(2 if norm else 0)]
    cache = {name: torch.full((blocks, 4, KV_HEADS, DIM), torch.nan).double() for name in ("key", "value")}
    query = op.run(qkv, cache, op.plan(where), *weights)
    written = {name: tensor.flatten(0, 1) for name, tensor in cache.items()}
    for row, (position, slot) in enumerate(zip(where.positions.tolist(), where.slot_mapping.tolist(), strict=True)):
        q, k, v = qkv[row].view(-1, DIM).split((HEADS, KV_HEADS, KV_HEADS))
        if norm:
            q, k = normed(q, weights[0]), normed(k, weights[1])
        torch.testing.assert_close(query[row], rotated(q, position), rtol=1e-5, atol=1e-6)  # angles are float32
        torch.testing.assert_close(written["key"][slot], rotated(k, position), rtol=1e-5, atol=1e-6)
        assert torch.equal(written["value"][slot], v)
    others = [slot for slot in range(4 * blocks) if slot not in where.slot_mapping.tolist()]
    assert bool(written["key"][others].isnan().all())
    assert bool(written["value"][others].isnan().all())


def test_a_norm_without_weights_is_an_error() -> None:
    request = AttentionInputsRequest(
        cache_group="full",
        q_heads=1,
        kv_heads=1,
        head_dim=4,
        theta=1e4,
        max_positions=8,
        norm_eps=EPS,
        dtype="float32",
        cache_dtype="float32",
        block_size=4,
    )
    op = operator(request)
    where, blocks = layout([1], [1], 4)
    cache = {name: torch.zeros(blocks, 4, 1, 4) for name in ("key", "value")}
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        op.run(torch.zeros(1, 12), cache, op.plan(where))


@pytest.mark.parametrize(("bias", "limit"), [(False, None), (True, None), (True, 0.3)])
def test_gated_linear(bias: bool, limit: float | None) -> None:
    request = GatedLinearRequest(
        in_features=10, width=7, dtype="float64", weight_dtype="float64", bias=bias, limit=limit
    )
    op = operator(request)
    x, gate, up = (torch.randn(n, 10, dtype=torch.float64) for n in (3, 7, 7))
    offsets = torch.randn(14, dtype=torch.float64)
    packed = op.prepare([gate, up], offsets if bias else None)
    g, u = x @ gate.T, x @ up.T
    if bias:
        g, u = g + offsets[:7], u + offsets[7:]
    if limit is not None:
        g, u = g.minimum(torch.tensor(limit)), u.maximum(torch.tensor(-limit)).minimum(torch.tensor(limit))
    torch.testing.assert_close(op.run(x, packed), g / (1 + torch.exp(-g)) * u)
    assert op.run(x[:0], packed).shape == (0, 7)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("bias", "limit"), [(False, None), (True, 0.3)])
def test_between_attention(bias: bool, limit: float | None, last: bool) -> None:
    request = BetweenAttentionRequest(
        hidden=DIM, attended=6, width=7, merged=10, eps=EPS, dtype="float64", weight_dtype="float64",
        attention_bias=bias, mlp_bias=bias, limit=limit,
    )  # fmt: skip
    op = operator(request)
    shapes = {"attention_out": (DIM, 6), "gate_up": (14, DIM), "down": (DIM, 7), "qkv": (10, DIM)}
    weights = {part: torch.randn(shape, dtype=torch.float64) for part, shape in shapes.items()}
    offsets = {part: torch.randn(out, dtype=torch.float64) * bias for part, (out, _) in shapes.items()}
    packed = {
        part: op.prepare(part, [weight[:3], weight[3:]], offsets[part] if bias else None)
        for part, weight in weights.items()
    }
    norms = [torch.randn(DIM, dtype=torch.float64) for _ in range(2)]
    qkv = packed.pop("qkv")
    given = BetweenWeights(norm=norms[0], next_norm=norms[1], next_qkv=None if last else qkv, **packed)

    def times(x: torch.Tensor, part: str) -> torch.Tensor:
        return x @ weights[part].T + offsets[part]

    attended, residual = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, DIM, dtype=torch.float64)
    total = residual + times(attended, "attention_out")
    g, u = times(normed(total, norms[0]), "gate_up").split(7, 1)
    if limit is not None:
        g, u = g.minimum(torch.tensor(limit)), u.maximum(torch.tensor(-limit)).minimum(torch.tensor(limit))
    total = total + times(g / (1 + torch.exp(-g)) * u, "down")
    expected = normed(total, norms[1])
    torch.testing.assert_close(op.first(total, norms[1], qkv), times(expected, "qkv"))
    rows, found = op.run(attended, residual.clone(), given)
    torch.testing.assert_close(found, total)
    torch.testing.assert_close(rows, expected if last else times(expected, "qkv"))
    assert op.run(attended[:0], residual[:0], given)[0].shape == (0, DIM if last else 10)
