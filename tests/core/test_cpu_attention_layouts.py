"""What the host's paged attention does alike in both of its layouts, against a float64 formula.

The cache rows of other requests hold NaN throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from cpu_support import operator
from reference_support import layout
from test_cpu_attention import TOLERANCE, request
from test_cpu_transposed_keys import Transposed, transposed
from test_reference_attention import BLOCK, DIM, MIXED, Q_HEADS, Scene

from deepinfer_core.cpu import attention_plan
from deepinfer_core.cpu.attention_plan import FEW_ROWS

Caches = dict[str, torch.Tensor]


@attrs.frozen
class Kind:
    """A provider, scenes in its layout, and how a cache of layout ``paged`` lies there."""

    provider: str
    scene: type[Scene]
    laid: Callable[[Caches], Caches]

    def paged(self, **changes: Any) -> Any:
        return operator(request(**changes), self.provider)


KINDS = {
    "paged": Kind("paged_in_place", Scene, lambda cache: cache),
    "transposed_keys": Kind("paged_transposed", Transposed, transposed),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def check(kind: Kind, scene: Scene, window: int | None) -> None:
    result = scene.attend(kind.paged(window=window))
    torch.testing.assert_close(result.double(), scene.formula(window=window), rtol=TOLERANCE, atol=TOLERANCE)


STEPS = {
    "one row": ([1], [1]),
    "decode rows": ([1, 1, 1], [3, 17, 18]),
    "decode rows of very different lengths": ([1] * 10, [1, 2, 30, 31, 60, 100, 150, 200, 201, 90]),
    "drafts": ([3, 1, 4, 2], [9, 5, 40, 2]),
    "one prompt": ([20], [20]),
    "a chunk after others": ([20], [53]),
    "decode rows before chunks": ([1, 2, 20, 30], [7, 60, 20, 41]),
    "chunks before decode rows": ([30, 20, 1], [41, 20, 7]),
    "requests without rows": ([0, 2, 0, 20], [5, 6, 1, 33]),
    "at the limit of few rows": ([FEW_ROWS, FEW_ROWS + 1], [FEW_ROWS, FEW_ROWS + 5]),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_equals_the_formula(kind: Kind, name: str, window: int | None) -> None:
    check(kind, kind.scene(*STEPS[name]), window)


@pytest.mark.parametrize("window", [None, 9])
def test_a_chunk_in_several_parts(kind: Kind, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention_plan, "CHUNK_ROWS", 12)
    check(kind, kind.scene([40, 30], [40, 47]), window)


def test_window_never_reads_blocks_that_slid_out(kind: Kind) -> None:
    for queries in (2, 12):
        scene = kind.scene([queries], [26])
        op = kind.paged(window=3)
        expected = scene.attend(op)
        scene.layout.block_table[0, : (26 - queries - 2) // BLOCK] = 0
        assert torch.equal(scene.attend(op), expected)


def test_a_broken_key_stays_with_its_request(kind: Kind) -> None:
    for queries in ([1, 1, 1], [1, 20, 20]):
        scene = kind.scene(queries, [9, 30, 31])
        clean = scene.attend(kind.paged())
        rows = scene.layout.block_table[1, :2].long()
        scene.cache["key"][rows] = float("nan")
        scene.cache["value"][rows] = float("nan")
        found = scene.attend(kind.paged())
        end = queries[0] + queries[1]
        assert found[queries[0] : end].isnan().all()
        assert torch.equal(found[: queries[0]], clean[: queries[0]])
        assert torch.equal(found[end:], clean[end:])


def test_a_decode_row_is_the_same_alone_and_beside_others(kind: Kind) -> None:
    """Bit for bit: speculation compares drafts with tokens drawn in steps of other shapes."""
    scene = kind.scene([1, 3, 1, 1], [50, 44, 9, 200])
    together = scene.attend(kind.paged())
    op = kind.paged()
    alone, blocks = layout([1], [50], BLOCK)
    assert blocks
    alone.block_table = scene.layout.block_table[:1]
    assert torch.equal(op.run(scene.query[:1], kind.laid(scene.cache), op.plan(alone)), together[:1])


def test_large_scores_do_not_overflow(kind: Kind) -> None:
    for queries in (3, 12):
        scene = kind.scene([queries], [12])
        scene.query = scene.query * 1e4
        assert scene.attend(kind.paged()).isfinite().all()


def test_query_may_be_a_slice_of_a_wider_tensor(kind: Kind) -> None:
    scene = kind.scene(*MIXED)
    expected = scene.attend(kind.paged())
    scene.query = torch.cat((scene.query, torch.zeros_like(scene.query)), dim=1)[:, :Q_HEADS]
    assert not scene.query.is_contiguous()
    assert torch.equal(scene.attend(kind.paged()), expected)


def test_no_rows(kind: Kind) -> None:
    for step in (([], []), ([0, 0], [3, 5])):
        assert kind.scene(*step).attend(kind.paged()).shape == (0, Q_HEADS, DIM)
