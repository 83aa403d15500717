"""One row's product as a sum of the packed weight's columns, against float64; and that the layout is never assumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import normal, operator
from test_cpu_linear import check, request

from deepinfer_core.cpu import columns
from deepinfer_core.cpu import linear as module

pytestmark = pytest.mark.skipif(not module.has_onednn(), reason="torch was built without oneDNN")

SHAPES = [(512, 512), (1536, 512), (300, 320), (1027, 64)]


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on hosts where oneDNN's product is the faster one."""
    monkeypatch.setattr(module, "largest", lambda: 1 << 30)
    monkeypatch.setattr(module, "SMALL", 0)


def packed(inp: int, out: int, bias: torch.Tensor | None = None) -> tuple[Any, Any, torch.Tensor]:
    op, weight = operator(request(inp, out, bias is not None), "packed_linear"), normal(out, inp, seed=1)
    return op, op.prepare([weight], bias), weight


def blocked(inp: int, out: int) -> bool:
    """Whether this host's oneDNN keeps such a weight in blocks of 64 outputs."""
    weight = normal(out, inp, seed=1)
    return columns.blocks_of(torch.ops.mkldnn._reorder_linear_weight(weight, 32), weight) is not None


@pytest.mark.parametrize(("inp", "out"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_equals_the_formula(inp: int, out: int, biased: bool) -> None:
    bias = normal(out, seed=3) if biased else None
    op, weight, plain = packed(inp, out, bias)
    assert (weight.columns is not None) == blocked(inp, out)
    for seed in range(3):
        x = normal(1, inp, seed=10 + seed)
        check(op.run(x, weight), x, plain, bias)
    many = normal(5, inp, seed=2)
    check(op.run(many, weight), many, plain, bias)


def test_weights_of_one_operator_do_not_mix() -> None:
    op = operator(request(512, 512), "packed_linear")
    plain = [normal(512, 512, seed=seed) for seed in (1, 2)]
    kept = [op.prepare([weight]) for weight in plain]
    x = normal(1, 512, seed=3)
    first = op.run(x, kept[0])
    check(op.run(x + 1, kept[1]), x + 1, plain[1])
    check(first, x, plain[0])


def test_a_strided_row() -> None:
    op, weight, plain = packed(512, 512)
    x = normal(512, 4, seed=2).T[1:2]
    check(op.run(x, weight), x, plain)


def test_memory_that_holds_something_else_is_refused() -> None:
    weight = normal(128, 64, seed=1)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    changed = weight.clone()
    changed[77, 5] += 1
    assert columns.blocks_of(reordered, changed) is None


def test_outputs_that_fill_no_block_are_refused() -> None:
    weight = normal(100, 64, seed=1)
    assert columns.blocks_of(torch.ops.mkldnn._reorder_linear_weight(weight, 32), weight) is None


def test_unknown_vectors_sum_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert columns.largest() == 0
