"""Would the parity tests notice? Each known mistake, made on purpose, must make the very same check fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from v4.mutants import MUTANTS, Wrapped
from v4.support import Build, Oracle, Stepper, assert_same, chunk_ends, oracle, random_model, random_tokens

from deepinfer_core.api import HyperConnectionRequest, OpRequest

SEED, LENGTH = 3, 45
Run = Callable[[Any], torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_v4")
    random_model(SEED).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def wanted() -> Oracle:
    found = oracle(random_model(SEED), random_tokens(SEED, LENGTH))
    assert not found.near_ties
    return found


@pytest.fixture
def run(checkpoint: Path, wanted: Oracle) -> Run:
    """In chunks of 7: some mistakes need state from an earlier step."""

    def run(mutant: Any) -> torch.Tensor:
        return Stepper(checkpoint, mutant=mutant).run(wanted.tokens, chunk_ends(LENGTH, 7))

    return run


def test_without_a_mistake_the_check_passes(run: Run, wanted: Oracle) -> None:
    def unchanged(slot: str, request: OpRequest, build: Build) -> Any:
        return build(request)

    assert_same(run(unchanged), wanted, "unchanged")


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_check_notices(run: Run, wanted: Oracle, name: str) -> None:
    with pytest.raises(AssertionError, match="logprobs differ by"):
        assert_same(run(MUTANTS[name]), wanted, name)


def test_one_mistake_is_too_small_for_it(run: Run, wanted: Oracle) -> None:
    """``pre`` without its eps: only the operator's own tests, written in plain numbers, see it."""

    def without_eps(slot: str, request: OpRequest, build: Build) -> Any:
        if not isinstance(request, HyperConnectionRequest):
            return None
        op, eps = build(request), request.eps

        def mix(streams: torch.Tensor, weight: Any) -> Any:
            mixed, carry = op.mix(streams, weight)
            return mixed - eps * streams.sum(1), carry

        return Wrapped(op, mix=mix)

    assert_same(run(without_eps), wanted, "pre without eps")
