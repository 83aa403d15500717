"""How clearly drafts won: measured, recorded, fitted to, and read by calibration without a look at what was drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepinfer_spec_decode.calibrate import read_records
from deepinfer_spec_decode.calibration import scaled
from deepinfer_spec_decode.cost_table import StepCosts
from deepinfer_spec_decode.margins import LARGEST, Margins
from deepinfer_spec_decode.sts import PLAIN, Records, Scaling, fit, logits_of, tempered
from scipy.optimize import minimize
from scipy.stats import chi2_contingency
from speculating import fix_seeds
from test_deepseek_v4 import PROMPTS, open_llm
from v4_drafters import V4, dspark, mtp

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConfigError, DraftStep, Proposal

TRUE = Scaling((1.5, 0.8), (-1.0, -0.6), ((0.4, 1.2), (1.0, 0.2)))
FILE = "drafter_calibration.json"


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> V4:
    return dspark(tmp_path_factory.mktemp("dspark"))


@contextmanager
def calibrated(path: Path, scaling: Scaling) -> Iterator[None]:
    """All rules the same, for a time."""
    found = {"temperatures": scaling.temperatures, "biases": scaling.biases, "margins": scaling.margins}
    with written(path, {"dspark": dict.fromkeys(("exact", "rejection", "greedy"), found)}):
        yield


@contextmanager
def written(path: Path, content: Any) -> Iterator[None]:
    (path / FILE).write_text(json.dumps(content))
    try:
        yield
    finally:
        (path / FILE).unlink()


# ---- measured


def margin(scores: torch.Tensor) -> torch.Tensor:
    step: Any = SimpleNamespace(choose=lambda scores, j: (scores.argmax(-1), scores))
    margins = Margins(step)
    assert margins.choose(scores, 0)[0].tolist() == scores.argmax(-1).tolist()
    return margins.all()[:, 0]


@pytest.mark.parametrize("vocab", [2, 63, 64, 100, 128, 4096])
def test_the_distance_to_the_second_best(vocab: int) -> None:
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    scores = torch.randn(200, vocab, generator=generator) * 3
    scores[:50] = scores[:50].round()  # ties, within a group and across
    ranked = scores.sort(-1, descending=True).values
    torch.testing.assert_close(margin(scores), ranked[:, 0] - ranked[:, 1])
    torch.testing.assert_close(margin(scores[:3]), margin(scores)[:3])
    first = torch.zeros(1, vocab)
    first[0, 0] = 2.0
    assert margin(first).tolist() == [2.0]


@pytest.mark.parametrize("vocab", [10, 128])
def test_what_has_no_second_best(vocab: int) -> None:
    scores = torch.full((8, vocab), float("-inf"))
    scores[0, 5], scores[1, 5], scores[1, 6] = 1.0, 1e9, 0.0
    assert margin(scores).tolist() == [LARGEST, LARGEST, *[0.0] * 6]


# ---- fitted to


def drafts(count: int, seed: int, scaling: Scaling = TRUE) -> Records:
    """Drafts whose acceptance follows what is said, scaled."""
    rng = np.random.default_rng(seed)
    logits, margins = rng.normal(0.5, 1.2, (count, 2)), rng.exponential(1.5, (count, 2))
    records = Records(logits=logits, accepted=np.zeros(count), prompts=np.arange(count), margins=margins)
    chances = np.stack([records.chances(scaling, k) for k in range(2)], 1)
    accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(1)
    return Records(logits=logits, accepted=accepted, prompts=np.arange(count), margins=margins)


def test_the_chance_by_hand() -> None:
    records = Records.of([[0.5, 0.8]], [1], margins=[[4.0, 0.25]])
    first = -1.0 + 0.4 * 4 + 1.2 * 2
    second = np.log(4) / 0.8 - 0.6 + 1.0 * 0.25 + 0.2 * 0.5
    assert records.survival(TRUE)[0] == pytest.approx(np.cumprod(1 / (1 + np.exp([-first, -second]))))
    assert records.survival(PLAIN)[0] == pytest.approx([0.5, 0.4])


def test_true_weights_are_found() -> None:
    records, held_out = drafts(40000, 1), drafts(20000, 2)
    found = fit(records, bias=True, margin=True)
    for wanted, weights in zip(TRUE.margins, found.margins, strict=True):
        points = np.array([0.1, 0.5, 1.0, 3.0, 5.0])
        said, true = (slope * points + root * np.sqrt(points) for slope, root in (weights, wanted))
        assert said - said[2] == pytest.approx(true - true[2], abs=0.35)
    assert held_out.error(held_out.survival(found)) < 0.012
    without = held_out.survival(fit(records, bias=True))
    assert _log_loss(held_out, held_out.survival(found)) < _log_loss(held_out, without) - 0.02
    assert _log_loss(held_out, held_out.survival(found)) < _log_loss(held_out, held_out.survival(TRUE)) + 1e-3


def test_weights_have_the_least_log_loss() -> None:
    """Against a general minimiser, of few drafts; that the second factor multiplies the first makes it no logistic
    regression."""
    records = drafts(700, random.randrange(9999))
    found = fit(records, bias=True, margin=True)
    first = records.chances(found, 0)

    def loss(x: Any, k: int, before: Any) -> float:
        scaling = Scaling((float(np.exp(x[0])),), (float(x[1]),), ((float(x[2]), float(x[3])),))
        part = Records(
            logits=records.logits[:, k : k + 1],
            accepted=records.accepted,
            prompts=records.prompts,
            margins=records.margins[:, k : k + 1],  # type: ignore[index]
        )
        said = np.clip(before * part.chances(scaling, 0), 1e-12, 1 - 1e-12)
        return float(-np.log(np.where(records.accepted > k, said, 1 - said)).mean())

    for k, before in ((0, np.ones(700)), (1, first)):
        own = (np.log(found.temperatures[k]), found.biases[k], *found.margins[k])
        least = minimize(loss, own, args=(k, before), method="Nelder-Mead", options={"maxiter": 4000}).fun
        assert loss(own, k, before) <= least + 3e-4


def test_drafts_that_can_be_told_apart_leave_finite_weights() -> None:
    margins = np.linspace(0, 4, 100)[:, None]
    records = Records(
        logits=np.zeros((100, 1)), accepted=(margins[:, 0] > 2).astype(int), prompts=np.arange(100), margins=margins
    )
    found = fit(records, bias=True, margin=True)
    assert np.isfinite(found.margins).all()
    assert 0.2 <= found.temperatures[0] <= 5
    assert records.error(records.survival(found)) < 0.1
    assert fit(Records.of([[0.5]] * 100, [1, 0] * 50), bias=True, margin=True).margins == ()


def _log_loss(records: Records, survival: Any) -> float:
    said, came = records.pairs(survival)
    return float(-np.log(np.where(came, said, 1 - said)).mean())


# ---- in the engine


def test_scaling_is_what_the_engine_does() -> None:
    records = Records.of([[0.2, 0.9, 0.5]], [0], margins=[[0.0, 3.0, 0.5]])
    chances = np.stack([records.chances(TRUE, k) for k in range(3)], 1)
    logits, margins = torch.from_numpy(records.logits), torch.tensor([[0.0, 3.0, 0.5]])
    assert scaled(logits, TRUE, margins).numpy() == pytest.approx(chances, abs=1e-6)
    alone = np.stack([tempered(records.logits[:, k], *TRUE.at(k)) for k in range(3)], 1)
    assert scaled(logits, TRUE).numpy() == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_records_are_what_scaled_confidences_are_made_of(
    v4: V4, tmp_path: Path, ahead: bool, temperature: float
) -> None:
    """Drafts are the same with and without: what is said with a calibration follows from what was recorded without."""
    params = [SamplingParams(temperature=temperature, max_tokens=12, seed=i) for i in range(len(PROMPTS))]
    told = {}
    for calibration in ("off", "auto"):
        path = tmp_path / calibration
        plugins = {"spec_decode": {"calibration": calibration, "record_file": str(path)}}
        options: dict[str, Any] = {"plugins": plugins, "scheduling": {"async_scheduling": ahead}}
        with calibrated(v4.path, TRUE), open_llm(v4.path, "dspark", **options) as llm:
            llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
        told[calibration] = [json.loads(line) for line in path.read_text().splitlines()]
    plain, spoken = told["off"], told["auto"]
    assert len(plain) == len(spoken) > 20
    assert [e["margin"] for e in plain] == [e["margin"] for e in spoken]
    assert all(len(e["margin"]) == len(e["confidence"]) > 0 for e in plain)
    records = read_records(tmp_path / "off", "exact")
    said = np.cumprod(np.stack([records.chances(TRUE, k) for k in range(records.logits.shape[1])], 1), axis=1)
    for row, entry in zip(said, spoken, strict=True):
        assert np.cumprod(entry["confidence"]) == pytest.approx(row[: len(entry["confidence"])], abs=1e-4)


def test_the_margin_is_that_of_the_module(v4: V4) -> None:
    with open_llm(v4.path, "dspark", plugins={"spec_decode": {"record_file": "/dev/null"}}) as llm:
        drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
        made: list[tuple[list[int], list[float]]] = []
        propose = drafter.propose

        def heard(step: DraftStep) -> Proposal:
            proposal: Proposal = propose(step)
            assert proposal.notes is not None
            for i, anchor in enumerate(step.host_anchors):
                made.append((step.state.history[step.slots[i], : int(anchor) + 1].tolist(), proposal.notes[i].tolist()))
            return proposal

        drafter.propose = heard
        llm.generate([{"prompt_token_ids": PROMPTS[4]}], SamplingParams(temperature=0, max_tokens=6))
    for past, notes in made[:4]:
        assert notes == pytest.approx(v4.margins(past), abs=1e-2)


def test_without_need_nothing_is_measured(v4: V4) -> None:
    with open_llm(v4.path, "dspark") as llm:
        assert llm.engine.core.speculator is not None
        drafter: Any = llm.engine.core.speculator.drafter
        assert not drafter._measures


def test_what_is_said_has_not_seen_what_was_drawn(v4: V4) -> None:
    """Under rejection: drafts of one context differ, and what is said of the first does not; what is said of later
    ones is a matter of those before them."""
    rejection: dict[str, Any] = {"speculation": {"verify": "rejection"}}
    with calibrated(v4.path, TRUE), open_llm(v4.path, "dspark", **rejection) as llm:
        drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
        said: dict[tuple[int, ...], list[float]] = {}
        propose = drafter.propose

        def heard(step: DraftStep) -> Proposal:
            proposal: Proposal = propose(step)
            assert proposal.confidence is not None
            for i, anchor in enumerate(step.host_anchors):
                past = step.state.history[step.slots[i], : int(anchor) + 1].tolist()
                tokens = proposal.tokens[i].tolist()
                for j, confidence in enumerate(proposal.confidence[i].tolist()):
                    said.setdefault((len(past), *past, *tokens[:j]), []).append(confidence)
            return proposal

        drafter.propose = heard
        params = SamplingParams(temperature=0.3, max_tokens=3)
        llm.generate([{"prompt_token_ids": PROMPTS[3]}] * 200, params)
    repeated = [found for found in said.values() if len(found) > 5]
    assert len(repeated) > 10
    for found in repeated:
        assert found == pytest.approx([found[0]] * len(found), abs=1e-4)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_tokens_under_rejection_are_distributed_as_without(v4: V4, ahead: bool) -> None:
    """Clear drafts are verified rather than others; tokens are as often drawn as without drafts."""
    clear = Scaling((1.0,), (-2.0,), ((3.0, 1.0),))
    more = {"verify": "rejection", "schedule": "confidence"}
    params = SamplingParams(temperature=2.0, max_tokens=4)
    found = []
    scheduling = {"async_scheduling": ahead}
    for method in ("dspark", ""):
        options: dict[str, Any] = {"speculation": more} if method else {}
        with calibrated(v4.path, clear), open_llm(v4.path, method, scheduling=scheduling, **options) as llm:
            core = llm.engine.core
            if core.planner.drafting is not None:
                schedule: Any = core.planner.drafting.schedule
                schedule.costs = StepCosts([(1, 4.0), (401, 44.0)])
                schedule.costs.observe = schedule.observe = lambda cost: None
                schedule.drafts = lambda requests, fresh: requests
            fix_seeds(llm, base=len(found) * 10**6)
            outputs = llm.generate([{"prompt_token_ids": PROMPTS[3]}] * 300, params)
            if core.speculator is not None:
                assert 100 < core.speculator.proposed < 1400
        tokens = np.array([o.outputs[0].token_ids for o in outputs])
        found.append(np.bincount((tokens[:, 1] % 4) * 4 + tokens[:, 2] % 4, minlength=16))
    table = np.stack(found)[:, np.sum(found, axis=0) > 10]
    assert chi2_contingency(table).pvalue > 1e-4


# ---- refused


@pytest.mark.parametrize("margins", [[1.0], [[1.0]], [[1.0, "nan"]], [["a", 1.0]]])
def test_broken_weights_are_one_clear_error(v4: V4, margins: Any) -> None:
    content = {"dspark": {"greedy": {"temperatures": [1.0], "margins": margins}}}
    with written(v4.path, content), pytest.raises(ConfigError, match=r"drafter_calibration\.json"):
        open_llm(v4.path, "dspark")


def test_weights_of_a_drafter_without_margins(tmp_path: Path) -> None:
    path = mtp(tmp_path).path
    content = {"mtp": {"greedy": {"temperatures": [1.0], "margins": [[1.0, 0.0]]}}}
    with written(path, content), pytest.raises(ConfigError, match="'margins' of 'mtp', which has none"):
        open_llm(path, "mtp")


def test_logits_of_padding_stay_padding() -> None:
    assert np.isnan(logits_of(np.array([np.nan, 0.5]))).tolist() == [True, False]
