"""Sampling stages that go by rows, on any device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import CAP, normal, operator, reference_operator
from sampling_company import STAGES, check_stage

from deepinfer_core.api import SamplingRequest

NAMES = ("min_p", "top_k", "top_p", "draw", "verify", "logprobs")


def request_of(name: str) -> SamplingRequest:
    return SamplingRequest(stage=name, vocab_size=STAGES.vocab, demands=frozenset({CAP}))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(rows=st.integers(1, 60), seed=st.integers(0, 99))
def test_rows_alone_and_together(name: str, rows: int, seed: int) -> None:
    check_stage(operator(request_of(name), f"batch_invariance:{name}_by_row"), name, rows, seed)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_log_probabilities_equal_the_reference(rows: int) -> None:
    logits, ids = normal(rows, STAGES.vocab, seed=1), torch.arange(rows)
    found = operator(request_of("logprobs"), "batch_invariance:logprobs_by_row").run(logits, ids, 3)
    wanted = reference_operator(request_of("logprobs")).run(logits, ids, 3)
    assert torch.equal(found.rank, wanted.rank)
    assert torch.equal(found.top_ids, wanted.top_ids)
    assert torch.allclose(found.chosen, wanted.chosen)
    assert found.top.shape == (rows, 3)
