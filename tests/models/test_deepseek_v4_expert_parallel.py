"""A DeepSeek-V4 whose experts lie on two and on four processes gives the bits that one process gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expert_parallel_member import INVARIANT, Steps
from v4.stepper import Stepper, plan_of
from v4.support import random_model, random_tokens

from deepinfer_core.api import ConfigError, ExpertPlacement, ExpertShare
from deepinfer_core.conformance.ranks import Ranks

pytest.importorskip("deepinfer_batch_invariance")

EXPERTS = 8
SIZES = (2, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v4")
    random_model(5).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=SIZES)
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param, "deepinfer_core.conformance.ranks:join_host_group")
    yield ranks
    ranks.close()


def in_chunks(seed: int, sizes: list[int]) -> Steps:
    """One text in chunks of these sizes, one a step."""
    tokens, steps, start = random_tokens(seed, sum(sizes)), [], 0
    for size in sizes:
        steps.append([(0, tokens[start : start + size], start)] if size else [])
        start += size
    return steps


def alone(path: Path, steps: Steps) -> list[torch.Tensor]:
    """In one process that holds all experts."""
    stepper = Stepper(path, **INVARIANT)
    return [stepper.step(parts) for parts in steps]


def shared(group: Ranks, path: Path, placement: ExpertPlacement, steps: list[Steps]) -> list[list[torch.Tensor]]:
    """Every rank takes its own steps; the answers by rank. Nobody read an expert that it does not hold."""
    found = group.ask("expert_parallel_member:logprobs", [(path, placement, mine) for mine in steps])
    for rank, (_, read) in enumerate(found):
        held = {int(number[1]) for name in read if (number := re.search(r"\.experts\.(\d+)\.", name))}
        assert held == {max(expert, 0) for expert in placement.slots[rank]}
    return [[torch.from_numpy(step) for step in answers] for answers, _ in found]


def test_the_same_rows_everywhere(group: Ranks, path: Path) -> None:
    """As when attention is computed in every process and only the experts are shared."""
    steps = in_chunks(1, [21, 1, 1, 7])
    wanted = alone(path, steps)
    placement = ExpertPlacement.in_order(EXPERTS, group.size, redundant=2)
    for answers in shared(group, path, placement, [steps] * group.size):
        assert all(torch.equal(found, right) for found, right in zip(answers, wanted, strict=True))


def test_rows_of_its_own_for_each_and_none_for_some(group: Ranks, path: Path) -> None:
    """Every process has requests of its own, of other lengths, and steps in which it has no row."""
    sizes = [[17, 1, 1, 1], [0, 9, 0, 3], [5, 5, 5, 5], [0, 0, 0, 2]][: group.size]
    steps = [in_chunks(seed, chunks) for seed, chunks in enumerate(sizes)]
    slots = [[(3 * slot + rank) % EXPERTS for slot in range(EXPERTS)] for rank in range(group.size - 1)]
    placement = ExpertPlacement(experts=EXPERTS, slots=[*slots, [7, -1, 7, 2, -1, -1, -1, -1]])
    for mine, answers in zip(steps, shared(group, path, placement, steps), strict=True):
        wanted = alone(path, mine)
        assert all(torch.equal(found, right) for found, right in zip(answers, wanted, strict=True))


def test_a_process_needs_memory_for_its_own_experts_only(path: Path) -> None:
    placement = ExpertPlacement.in_order(EXPERTS, 4)
    shares = [None, *(ExpertShare(placement=placement, rank=rank) for rank in (0, 3))]
    specs = [plan_of(path, experts=share).spec for share in shares]
    everything, first, last = (
        sum(torch.Size(t.shape).numel() for name, t in spec.tensors.items() if ".experts." in name and t.loaded)
        for spec in specs
    )
    assert everything == 4 * first == 4 * last


def test_a_placement_of_other_experts_is_refused(path: Path) -> None:
    share = ExpertShare(placement=ExpertPlacement.in_order(6, 2), rank=0)
    with pytest.raises(ConfigError, match=r"a placement of 6 experts; n_routed_experts is 8"):
        plan_of(path, experts=share)
