"""A13 (vllm-project/vllm#3063): a temperature near zero must give the best token, not junk or NaN.

Here for the reference operators: the row's maximum is subtracted in float32 before the division.
"""

from __future__ import annotations

import pytest
import torch
from sampling_rows import step, through

from deepinfer_core.api import STAGES

LOGITS = [1.0, 7.5, 3.0]
SMALL = [1e-2, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-45, 1e-46, 0.0]


def pair(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The row of the case and a normal neighbour, as a model in ``dtype`` would give them."""
    return torch.tensor([LOGITS, [0.5, -0.5, 0.0]], dtype=dtype).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", SMALL)
def test_the_best_token_at_any_seed(temperature: float, dtype: torch.dtype) -> None:
    for seed in range(10):
        rows: list[dict[str, float]] = [{"temperature": temperature, "seed": seed}, {"seed": seed}]
        assert int(through(STAGES, pair(dtype), step(rows))[0]) == 1


@pytest.mark.parametrize("temperature", SMALL)
def test_probabilities_are_finite(temperature: float) -> None:
    processed = through(STAGES[:-1], pair(), step([{"temperature": temperature}, {}]))
    probabilities = processed.softmax(dim=-1)
    assert probabilities.isfinite().all()
    assert probabilities[0, 1] > 0.98


@pytest.mark.parametrize("temperature", SMALL)
def test_the_neighbour_is_unchanged(temperature: float) -> None:
    processed = through(STAGES[:-1], pair(), step([{"temperature": temperature}, {}]))
    assert torch.equal(processed[1], pair()[1])


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-5])
def test_huge_logits_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[3e38, 2e38, -3e38]])
    for seed in range(10):
        assert through(STAGES, logits, step([{"temperature": temperature, "seed": seed}])).item() == 0


def test_the_runner_up_at_one_hundredth_has_its_exact_odds() -> None:
    processed = through(STAGES[:-1], pair(), step([{"temperature": 1e-2}, {}]))
    assert float(processed[0, 1]) == 0.0
    assert float(processed[0, 2]) == pytest.approx(-450.0, rel=1e-6)
