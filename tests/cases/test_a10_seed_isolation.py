"""A10 (vllm-project/vllm#51226): a request's seed decides its tokens, whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import ids_of

from deepinfer_core import LLM, SamplingParams

PROMPT = [1, 2, 3, 4, 5, 6, 7]
SETTINGS: list[dict[str, Any]] = [
    {"scheduling__async_scheduling": ahead, **chunking}
    for ahead in (False, True)
    for chunking in ({}, {"scheduling__max_batch_tokens": 3}, {"scheduling__chunked_prefill": False})
]


def seeded(seed: int | None = 42, **more: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "temperature": 0.8, "max_tokens": 16} | more)


@pytest.fixture(params=SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def llm(request: pytest.FixtureRequest, toy_llm: ToyLLM) -> LLM:
    return toy_llm("Flat", **request.param)


@pytest.fixture
def alone(llm: LLM) -> list[int]:
    return ids_of(llm.generate(PROMPT, seeded()))[0]


def test_five_repeats(llm: LLM, alone: list[int]) -> None:
    assert len(alone) == 16
    assert all(ids_of(llm.generate(PROMPT, seeded())) == [alone] for _ in range(5))


@pytest.mark.parametrize("neighbour", [None, 7, 42, 2**64 - 1])
@pytest.mark.parametrize("row", [0, 1, 7])
def test_any_row_beside_any_neighbour(llm: LLM, alone: list[int], neighbour: int | None, row: int) -> None:
    prompts, params = [[9, i] for i in range(8)], [seeded(neighbour, temperature=1.3) for _ in range(8)]
    prompts[row], params[row] = PROMPT, seeded()
    assert ids_of(llm.generate(prompts, params))[row] == alone


def test_arrival_mid_decode(llm: LLM, alone: list[int]) -> None:
    stream = llm.stream([5], seeded(None, max_tokens=40))
    for _ in range(5):
        next(stream)
    assert ids_of(llm.generate([[8, 8], PROMPT], [seeded(3), seeded()]))[1] == alone
    stream.close()


@pytest.mark.parametrize("seed", [7, 2**63 - 1, 2**64 - 1])
def test_children_differ_and_repeat(llm: LLM, seed: int) -> None:
    first, second = ([c.token_ids for c in llm.generate(PROMPT, seeded(seed, n=3))[0].outputs] for _ in range(2))
    assert len({tuple(ids) for ids in first}) == 3
    assert second == first
    assert first[0] == ids_of(llm.generate(PROMPT, seeded(seed)))[0]


def test_large_seeds_do_not_collide(llm: LLM) -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    assert len({tuple(ids) for ids in ids_of(llm.generate([PROMPT] * 7, [seeded(s) for s in seeds]))}) == 7


def test_unseeded_requests_differ(llm: LLM) -> None:
    one, two = ids_of(llm.generate([PROMPT] * 2, seeded(None)))
    assert one != two
