"""Paged attention against a float64 formula; the cache rows of other requests hold NaN throughout."""

from __future__ import annotations

import attrs
import pytest
import torch
from gpu_support import DTYPES, ON_GPU, here, operator, same_bits
from test_reference_attention import BLOCK, DIM, KV_HEADS, Q_HEADS, SCALE, Scene

from deepinfer_core.api import PagedAttentionRequest

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
STEPS = {
    "one row": ([1], [1]),
    "decode rows": ([1, 1, 1], [3, 17, 300]),
    "a long context": ([1], [700]),
    "drafts": ([3, 1, 4, 2], [9, 5, 40, 2]),
    "one prompt": ([70], [70]),
    "a chunk after others": ([45], [153]),
    "decode rows before chunks": ([1, 2, 20, 30], [7, 60, 20, 141]),
    "requests without rows": ([0, 2, 0, 20], [5, 6, 1, 33]),
}


def request(dtype: str = "float32", **changes: object) -> PagedAttentionRequest:
    made = PagedAttentionRequest(
        cache_group="full",
        q_heads=Q_HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        cache_dtype=dtype,
        scale=SCALE,
        block_size=BLOCK,
        demands=frozenset({"kv_layout:paged"}),
    )
    return attrs.evolve(made, **changes)


def attend(scene: Scene, wanted: PagedAttentionRequest, sinks: torch.Tensor | None = None) -> torch.Tensor:
    op = operator(wanted)
    where = here(scene.layout)
    found = op.run(here(scene.query), here(scene.cache), op.plan(where), None if sinks is None else here(sinks))
    assert found.dtype == scene.query.dtype
    return found.cpu().double()


def check(scene: Scene, wanted: PagedAttentionRequest, sinks: torch.Tensor | None = None) -> None:
    expected = scene.formula(window=wanted.window, softcap=wanted.softcap, sinks=sinks)
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(attend(scene, wanted, sinks), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STEPS)
def test_equals_the_formula(name: str, dtype: str) -> None:
    check(Scene(*STEPS[name], dtype=getattr(torch, dtype)), request(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 200] if ON_GPU else [5])
@pytest.mark.parametrize("name", ["decode rows", "drafts", "a chunk after others", "decode rows before chunks"])
def test_windows(name: str, window: int, dtype: str) -> None:
    check(Scene(*STEPS[name], dtype=getattr(torch, dtype)), request(dtype, window=window))


@pytest.mark.parametrize("name", ["decode rows", "decode rows before chunks"])
def test_soft_cap_and_sinks(name: str) -> None:
    sinks = torch.linspace(-2, 3, Q_HEADS)
    check(Scene(*STEPS[name]), request(softcap=1.5))
    check(Scene(*STEPS[name]), request(sinks=True), sinks)
    check(Scene(*STEPS[name]), request(sinks=True, softcap=1.5, window=30), sinks)


def test_windows_never_read_blocks_that_slid_out() -> None:
    for queries in (1, 2, 40):
        scene = Scene([queries], [180])
        wanted = request(window=3)
        expected = attend(scene, wanted)
        scene.layout.block_table[0, : (180 - queries - 2) // BLOCK] = 0  # a block of NaN
        assert torch.equal(attend(scene, wanted), expected)


def test_bounds_instead_of_lengths_change_nothing_but_the_splits() -> None:
    """What a recorded step gets: numbers of the host that are bounds."""
    scene = Scene([1, 1, 1], [3, 17, 300])
    expected = attend(scene, request())
    scene.layout.host_seq_lens[:] = scene.layout.max_seq_len = 4096
    torch.testing.assert_close(attend(scene, request()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 48, 64, 128])
def test_blocks_of_any_size(block_size: int) -> None:
    """Tokens read at once lie in one block, in some, or across blocks' ends."""
    scene = Scene([1, 2, 1], [150, 67, 3], block_size=block_size)
    check(scene, request(block_size=block_size))
    check(scene, request(block_size=block_size, window=70))


def test_a_context_in_many_chunks() -> None:
    """More than are put together at once; the short one has three."""
    scene = Scene([1, 1], [1700, 70])
    op, where = operator(request()), here(scene.layout)
    op._programs = 200
    plan = op.plan(where)
    assert int(plan.launches[0].work.tiles[0, 3]) > 16
    found = op.run(here(scene.query), here(scene.cache), plan).cpu().double()
    torch.testing.assert_close(found, scene.formula(window=None, softcap=None, sinks=None), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("name", ["decode rows", "a long context", "drafts", "requests without rows"])
def test_turned_tiles_equal_the_formula(name: str, rows: int) -> None:
    """Windows, caps and sinks among them; and tokens read at once in one block, in some, and across blocks' ends."""
    sinks = torch.linspace(-2, 3, Q_HEADS)
    for dtype in DTYPES:
        cases: list[tuple[dict[str, object], torch.Tensor | None, int]] = [({}, None, BLOCK)]
        if dtype == "float32":
            more: list[tuple[dict[str, object], torch.Tensor | None]] = [({}, None), ({"window": 30}, None)]
            more += [({"sinks": True}, sinks), ({"softcap": 1.5}, None)]
            cases += [(changes, given, size) for changes, given in more for size in (5, BLOCK, 32, 64, 128)]
        for changes, given, block_size in cases:
            scene = Scene(*STEPS[name], dtype=getattr(torch, dtype), block_size=block_size)
            wanted = request(dtype, block_size=block_size, **changes)
            op, where = operator(wanted), here(scene.layout)
            op._several = attrs.evolve(op._several, rows=16, turned=True)
            op._few = op._alone = attrs.evolve(op._few, rows=rows, turned=True)
            found = op.run(here(scene.query), here(scene.cache), op.plan(where), None if given is None else here(given))
            expected = scene.formula(window=wanted.window, softcap=wanted.softcap, sinks=given)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("contexts", [[650], [650, 33]])
def test_one_request_alone_has_tiles_of_its_own(contexts: list[int]) -> None:
    scene = Scene([1] * len(contexts), contexts, dtype=torch.float16)
    op, where = operator(request("float16")), here(scene.layout)
    plan = op.plan(where)
    assert op._alone.turned
    assert op._alone != op._few
    assert plan.launches[0].shape == (op._alone if len(contexts) == 1 else op._few)
    found = op.run(here(scene.query), here(scene.cache), plan).cpu().double()
    torch.testing.assert_close(found, scene.formula(), rtol=TOLERANCE["float16"], atol=TOLERANCE["float16"])


INVARIANT = frozenset({"kv_layout:paged", "batch_invariant"})


@pytest.mark.parametrize("window", [None, 50, 600] if ON_GPU else [None, 50])
def test_fixed_chunks_equal_the_formula(window: int | None) -> None:
    for queries, contexts in (([1, 1], [1100, 30]), ([3, 20, 1], [700, 540, 513])):
        check(Scene(queries, contexts), request(window=window, demands=INVARIANT))


def test_fixed_chunks_have_the_same_bits_however_many_programs_take_them() -> None:
    """Put together by the program that took all of them, by the last of a few, and by a launch of its own."""
    scene = Scene([1, 1], [1700, 70])
    where, found = here(scene.layout), []
    for programs in (1, 12, 200):
        op = operator(request(demands=INVARIANT))
        op._programs = programs
        found.append(op.run(here(scene.query), here(scene.cache), op.plan(where)))
    torch.testing.assert_close(
        found[0].cpu().double(), scene.formula(window=None, softcap=None, sinks=None), rtol=2e-5, atol=2e-5
    )
    same_bits(found[1], found[0])
    same_bits(found[2], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_fixed_chunks_give_a_row_the_same_bits_wherever_it_stands(window: int | None, dtype: str) -> None:
    """The last row of a context: decoded alone, beside others, and at the end of a prompt chunk of any size."""
    wanted = request(dtype, window=window, demands=INVARIANT)
    length = 600 if ON_GPU else 50
    whole = Scene([length], [length], dtype=getattr(torch, dtype))
    expected = attend(whole, wanted)
    for queries in (1, 2, 33):
        others, contexts = ([1, 1, 70], [5, 520, 90]) if ON_GPU else ([1], [40])
        scene = Scene([queries, *others], [length, *contexts], dtype=getattr(torch, dtype))
        scene.query[:queries] = whole.query[-queries:]
        same_bits(attend(scene, wanted)[:queries], expected[-queries:])


def test_no_rows() -> None:
    scene = Scene([0], [0])
    assert attend(scene, request()).shape == (0, Q_HEADS, DIM)
