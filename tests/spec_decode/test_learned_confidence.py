"""Drafters whose confidence is how often they were right: what a probe drafts is verified, so that they come back."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from deepinfer_spec_decode import schedule
from deepinfer_spec_decode.cost_table import StepCosts
from deepinfer_spec_decode.rates import MEMORY, AcceptanceRates
from deepinfer_spec_decode.schedule import ConfidenceSchedule
from deepinfer_spec_decode.settings import Settings
from speculating import drafting
from toys.checkpoints import open_toy, write_toy

from deepinfer_core import SamplingParams
from deepinfer_core.api import Verified, VerifyCost

COSTS = StepCosts([(1, 1e-4), (8, 1.7e-4), (64, 1e-3)])
"""Seven drafts pay if one of them is accepted."""


@pytest.fixture
def _costs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: ConfidenceSchedule, *_: Any) -> str:
        self._costs_began(COSTS)
        return "known"

    monkeypatch.setattr(ConfidenceSchedule, "start", start)
    observe = ConfidenceSchedule.observe

    def observed(self: ConfidenceSchedule, told: VerifyCost) -> None:
        """The machine's other work shall not matter."""
        seconds = float(COSTS.measured(np.array([told.rows]))[0])
        drafting = 5e-6 * bool(told.drafted)
        observe(self, attrs.evolve(told, target_seconds=seconds, draft_seconds=drafting, absorb_seconds=0.0))

    monkeypatch.setattr(ConfidenceSchedule, "observe", observed)
    monkeypatch.setattr(StepCosts, "observe", lambda self, cost: None)
    monkeypatch.setattr(StepCosts, "drafting", lambda self, requests: 5e-6)
    monkeypatch.setattr(schedule, "PROBE_SHARE", 1e9)


@pytest.mark.usefixtures("_costs_are_known")
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_ngrams_come_back_when_the_text_repeats(tmp_path: Path, ahead: bool) -> None:
    """Nothing of the first 400 tokens is foretold by those before, all of the others is."""
    rng = random.Random(random.randrange(10**6))
    pairs = [(a, b) for a in range(40) for b in range(40, 60)]
    rng.shuffle(pairs)  # each token is followed by another one each time
    script = [token for pair in pairs[:200] for token in pair] + [60, 61, 62, 63] * 150
    directory = write_toy(tmp_path / "toy", "Script", script=script, max_len=1024)
    settings = drafting("ngram", 5, speculation__schedule="confidence", plugins__spec_decode__probe_steps=4)
    llm = open_toy(directory, scheduling__async_scheduling=ahead, kv_cache__num_blocks=300, **settings)
    with llm:
        speculator: Any = llm.engine.core.speculator
        seen: list[tuple[int, int]] = []
        tell = speculator.drafter.verified

        def verified(results: list[Verified]) -> None:
            seen.extend((r.proposed, r.accepted) for r in results)
            tell(results)

        speculator.drafter.verified = verified
        (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=900))
        assert output.outputs[0].token_ids == script[:900]
        assert speculator.failures == 0
    wrong = [i for i, (_, accepted) in enumerate(seen) if accepted == 0]
    assert len(wrong) < 100  # it stopped, but for probes
    assert sum(accepted for _, accepted in seen) > 100
    assert statistics.mean(accepted for _, accepted in seen[-20:]) > 3


def test_a_probe_of_learned_confidences_is_verified_whole() -> None:
    """And what verifying took counts among what probes take."""
    made = ConfidenceSchedule(Settings(cost_cache="off"))
    made._costs_began(StepCosts([(1, 1.0), (64, 64.0)]))

    def told(rows: int, drafted: int, learned: bool) -> VerifyCost:
        chances = np.full((drafted, 3), 0.01) if drafted else None
        return VerifyCost(
            rows=rows, requests=8, target_seconds=float(rows), draft_seconds=0.5, drafted=drafted, decode=True,
            chances=chances, learned=learned,
        )  # fmt: skip

    survival, caps = np.full((8, 3), 0.01), np.array([3, 3, 0, 0, 0, 0, 0, 0])
    for learned in (False, True):
        for _ in range(20):
            made.drafts(8, 0)
            made.observe(told(8, 2, learned))
        assert made.drafts(8, 0) == 0
        assert made.budget(survival, caps, 8, delayed=True) == (6 if learned else 0)
    made.observe(told(8, 2, True))
    before = made._probe_seconds
    made.observe(told(14, 0, False))
    assert made._probe_seconds - before == pytest.approx(6.0)


def test_rates_forget() -> None:
    rates = AcceptanceRates(3)

    def learn(accepted: int, times: int) -> list[float]:
        for _ in range(times // 4):
            rates.learn([Verified(request_id="", child=0, proposed=3, accepted=accepted, tokens=[])] * 4)
        found: list[float] = rates.confidence().tolist()
        return found

    assert learn(0, 1000)[0] < 0.05
    assert learn(3, 3 * MEMORY) == pytest.approx([1.0] * 3, abs=0.06)
    found = learn(1, MEMORY)
    assert found[0] > 0.95
    assert found[1] < 0.5
