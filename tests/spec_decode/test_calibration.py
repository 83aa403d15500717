"""Sequential temperature scaling on drafts of known quality, and the command that fits it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from deepinfer_spec_decode.calibrate import read_prompts
from deepinfer_spec_decode.calibration import Calibration, read_scaling, scaled
from deepinfer_spec_decode.reliability import draw, points
from deepinfer_spec_decode.sts import (
    GRID,
    PLAIN,
    Records,
    Scaling,
    expected_calibration_error,
    fit,
    logits_of,
    tempered,
)
from test_deepseek_v4 import open_llm
from v4_drafters import dspark

from deepinfer_core.api import ConfigError
from deepinfer_core.cli.program import program

TRUE = (0.5, 2.0, 1.3)
SHIFTED = Scaling(TRUE, (0.0, -1.0, 0.8))


def drafts(count: int, seed: int, scaling: Scaling = Scaling(TRUE)) -> Records:  # noqa: B008
    """Drafts whose acceptance follows their confidence, scaled."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.2, (count, len(TRUE)))
    chances = np.stack([tempered(logits[:, k], *scaling.at(k)) for k in range(len(TRUE))], 1)
    accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(1)
    return Records(logits=logits, accepted=accepted)


def test_the_error_by_hand() -> None:
    said, came = np.array([0.05, 0.15, 0.15, 1.0]), np.array([0, 1, 0, 1])
    # Bins: one draft off by 0.05, two said 0.15 and came true half the time, one right.
    assert expected_calibration_error(said, came) == pytest.approx((0.05 + 2 * 0.35 + 0.0) / 4)
    assert expected_calibration_error(said[:0], came[:0]) == 0.0


def test_the_true_temperatures_are_found_left_to_right() -> None:
    found = fit(drafts(60000, 1))
    assert np.log(found.temperatures) == pytest.approx(np.log(TRUE), abs=0.25)
    assert found.biases == (0.0, 0.0, 0.0)
    held_out = drafts(20000, 2)
    assert held_out.error(PLAIN) > 0.03
    assert held_out.error(found) < 0.015


def test_biases_are_found_where_temperatures_do_not_help() -> None:
    records, held_out = drafts(20000, 5, SHIFTED), drafts(20000, 6, SHIFTED)
    found = fit(records, bias=True)
    assert found.biases == pytest.approx(SHIFTED.biases, abs=0.25)
    assert held_out.error(found) < 0.012 < 0.03 < held_out.error(fit(records))
    assert held_out.standard_error(found) < 0.005


def test_positions_are_fitted_by_brute_force() -> None:
    """The first temperature alone decides the first error; the second is the best for the product."""
    records = drafts(3000, 3)
    first, second, _ = fit(records).temperatures
    came = records.accepted > 0
    assert first == min(GRID, key=lambda t: expected_calibration_error(tempered(records.logits[:, 0], t), came))
    fixed = tempered(records.logits[:, 0], first)
    errors = [expected_calibration_error(fixed * tempered(records.logits[:, 1], t), records.accepted > 1) for t in GRID]
    assert second == GRID[int(np.argmin(errors))]


def test_short_drafts_and_rare_positions() -> None:
    records = Records.of([[0.9, 0.8], [0.7]] * 40, [2, 0] * 40)
    assert records.logits.shape == (80, 2)
    assert np.isnan(records.logits[1, 1])
    assert [len(said) for said, _ in records.outcomes(PLAIN)] == [80, 40]
    first, second = fit(records).temperatures
    assert second == first  # 40 drafts are too few to say


def test_scaling_is_what_the_engine_does() -> None:
    logits = logits_of(np.array([[0.2, 0.9, 0.5]]))
    scaling = Scaling((0.5, 2.0), (0.0, -1.0))
    ours = np.stack([tempered(logits[:, k], *scaling.at(k)) for k in range(3)], 1)
    assert scaled(torch.from_numpy(logits), scaling).numpy() == pytest.approx(ours, abs=1e-6)
    assert scaled(torch.tensor([[1e30, -1e30]]), PLAIN)[0].tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_greedy_requests_have_their_own() -> None:
    step: Any = SimpleNamespace(
        state=SimpleNamespace(temperature=torch.tensor([9.0, 0.0, 1.0])), slots=torch.tensor([2, 1])
    )
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    own = Calibration(Scaling((2.0,)), Scaling((4.0,)))
    expected = torch.stack((torch.sigmoid(logits[0] / 2), torch.sigmoid(logits[1] / 4)))
    torch.testing.assert_close(own.confidence(logits, step), expected)
    torch.testing.assert_close(Calibration(Scaling((2.0,))).confidence(logits, step), torch.sigmoid(logits / 2))


def test_prompts_of_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\\nb"\n\n"c"\n', encoding="utf-8")
    assert read_prompts(path) == ["a\nb", "c"]
    for text in ("a", "1"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"prompts\.jsonl"):
            read_prompts(path)


def test_reliability_points_of_what_is_right(tmp_path: Path) -> None:
    records = drafts(60000, 4)
    said, came = points(records, Scaling(TRUE))
    assert came == pytest.approx(said, abs=0.03)
    draw(tmp_path / "reliability.png", {"exact": (records, Scaling(TRUE))})
    assert (tmp_path / "reliability.png").stat().st_size > 5000


def test_the_command_writes_what_an_engine_reads(tmp_path: Path) -> None:
    v4 = dspark(tmp_path / "v4")
    (v4.path / "tokenizer.json").write_bytes(_tokenizer())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join("abcdefghijklmnopqrstuvwxyz"[i : i + 6] for i in range(12)), encoding="utf-8")
    plot = tmp_path / "plot.png"
    options = ["--model", str(v4.path), "--prompts", str(prompts), "--max-tokens", "16", "--plot", str(plot), "--json"]
    result = CliRunner().invoke(program, ["calibrate-drafter", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    written = json.loads(result.output.splitlines()[-1])
    path = v4.path / "drafter_calibration.json"
    assert written["path"] == str(path)
    assert plot.is_file()
    for rule in ("exact", "rejection", "greedy"):
        found = written["rules"][rule]
        assert found["drafts"] > 20
        assert read_scaling(path, "dspark", rule) == Scaling(tuple(found["temperatures"]), tuple(found["biases"]))
    path.write_text(json.dumps({"dspark": {r: {"temperatures": [4.0]} for r in ("exact", "rejection")}}))
    for calibration, wanted in (("auto", Calibration(Scaling((4.0,)))), ("off", Calibration())):
        with open_llm(v4.path, "dspark", plugins={"spec_decode": {"calibration": calibration}}) as llm:
            drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
            assert drafter._calibration == wanted


def _tokenizer() -> bytes:
    """The letters are tokens."""
    import tokenizers

    vocabulary = {chr(97 + i): i + 10 for i in range(26)} | {"?": 0}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return made.to_str().encode()


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '{"dspark": 1}',
        '{"dspark": {"exact": {"temperatures": [0]}}}',
        '{"dspark": {"exact": {"temperatures": [1], "biases": ["nan"]}}}',
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "drafter_calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"drafter_calibration\.json"):
        read_scaling(path, "dspark", "exact")
