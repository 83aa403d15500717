"""Sequential temperature scaling on drafts of known quality, and the command that fits it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from deepinfer_spec_decode.calibrate import read_prompts
from deepinfer_spec_decode.calibration import Calibration, read_scaling, scaled
from deepinfer_spec_decode.ngram import NGramDrafter
from deepinfer_spec_decode.reliability import draw, points
from deepinfer_spec_decode.settings import Settings
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
from scipy.optimize import minimize
from test_deepseek_v4 import open_llm
from toys.checkpoints import open_toy, write_toy
from v4_drafters import dspark

from deepinfer_core.api import ConfigError
from deepinfer_core.cli import main
from deepinfer_core.cli.program import program

TRUE = (0.5, 2.0, 1.3)
SHIFTED = Scaling(TRUE, (0.0, -1.0, 0.8))


def drafts(count: int, seed: int, scaling: Scaling = Scaling(TRUE)) -> Records:  # noqa: B008
    """Drafts whose acceptance follows their confidence, scaled."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.2, (count, len(TRUE)))
    chances = np.stack([tempered(logits[:, k], *scaling.at(k)) for k in range(len(TRUE))], 1)
    accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(1)
    return Records(logits=logits, accepted=accepted, prompts=np.arange(count))


def error(records: Records, scaling: Scaling) -> float:
    return records.error(records.survival(scaling))


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
    assert error(held_out, PLAIN) > 0.03
    assert error(held_out, found) < 0.015


def test_biases_are_found_where_temperatures_do_not_help() -> None:
    records, held_out = drafts(20000, 5, SHIFTED), drafts(20000, 6, SHIFTED)
    found = fit(records, bias=True)
    assert found.biases == pytest.approx(SHIFTED.biases, abs=0.15)
    assert np.log(found.temperatures) == pytest.approx(np.log(SHIFTED.temperatures), abs=0.15)
    assert error(held_out, found) < 0.012 < 0.03 < error(held_out, fit(records))
    assert held_out.standard_error(held_out.survival(found)) < 0.005


def test_two_numbers_have_the_least_log_loss() -> None:
    """Against a general minimiser, position by position, of few drafts, where chance is large."""
    records = drafts(800, random.randrange(9999), SHIFTED)
    found, product = fit(records, bias=True), np.ones(800)
    for k in range(3):
        before, logits, came = product, records.logits[:, k], records.accepted > k

        def loss(x: Any, before: Any = before, logits: Any = logits, came: Any = came) -> float:
            said = before * tempered(logits, float(np.exp(x[0])), float(x[1]))
            return float(-np.log(np.clip(np.where(came, said, 1 - said), 1e-9, 1)).mean())

        own = (np.log(found.temperatures[k]), found.biases[k])
        least = minimize(loss, own, method="Nelder-Mead").fun
        assert loss(own) <= least + 1e-4
        product = product * tempered(logits, *found.at(k))


def test_each_half_is_judged_by_the_other() -> None:
    """Prompts are kept together: what one prompt's drafts have in common does not help its own error."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0.5, 1.2, (400, 2))
    records = Records(logits=logits, accepted=rng.integers(0, 3, 400), prompts=np.repeat(np.arange(20), 20))
    said = records.crossed(bias=True)
    even = records.prompts % 2 == 0
    np.testing.assert_array_equal(said[even], records.part(even).survival(fit(records.part(~even), bias=True)))
    np.testing.assert_array_equal(said[~even], records.part(~even).survival(fit(records.part(even), bias=True)))


def test_the_error_of_few_drafts_by_chance() -> None:
    """What is true has that error on average; the fewer the drafts the larger. What is not has more."""
    few, many = drafts(300, 9), drafts(30000, 9)
    said = few.survival(Scaling(TRUE))
    own = [drafts(300, 100 + i) for i in range(40)]
    mean = float(np.mean([error(records, Scaling(TRUE)) for records in own]))
    assert few.least_error(said) == pytest.approx(mean, rel=0.2)
    assert many.least_error(many.survival(Scaling(TRUE))) < few.least_error(said) / 5
    assert many.least_error(many.survival(PLAIN)) < error(many, PLAIN) / 5


def test_drafts_of_a_prompt_are_drawn_together() -> None:
    """Ten equal drafts say no more than one: the error's own error is that of a tenth of the drafts."""
    one = drafts(200, 10)
    ten = Records(
        logits=np.repeat(one.logits, 10, 0), accepted=np.repeat(one.accepted, 10), prompts=np.repeat(one.prompts, 10)
    )
    apart = Records(logits=ten.logits, accepted=ten.accepted, prompts=np.arange(2000))
    said = ten.survival(Scaling(TRUE))
    alone = one.standard_error(one.survival(Scaling(TRUE)))
    assert ten.standard_error(said) == pytest.approx(alone, rel=0.3)
    assert apart.standard_error(said) < 0.7 * alone


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
    assert (~np.isnan(records.survival(PLAIN))).sum(0).tolist() == [80, 40]
    assert len(records.pairs(records.survival(PLAIN))[0]) == 120
    assert Records.of([[0.9], [0.8], [0.7]], [1, 0, 1], ["b", "a", "b"]).prompts.tolist() == [0, 1, 0]
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
    for text, said in (("a", "not JSON lines"), ('"a"\n{"prompt": 1}', r': {"prompt": 1}: expected a JSON string')):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"prompts\.jsonl.*{said}"):
            read_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^--prompts .*prompts\.jsonl: not UTF-8 text$"):
        read_prompts(path)


def test_reliability_points_of_what_is_right(tmp_path: Path) -> None:
    records = drafts(60000, 4)
    survival = records.survival(Scaling(TRUE))
    said, came = points(records, survival)
    assert came == pytest.approx(said, abs=0.03)
    draw(tmp_path / "reliability.png", {"exact": (records, survival)})
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
        assert 0 <= found["least_error"] < 0.5
        assert len(found["margins"]) == 5
        scaling = Scaling(
            tuple(found["temperatures"]), tuple(found["biases"]), tuple((s, r) for s, r in found["margins"])
        )
        assert read_scaling(path, "dspark", rule) == scaling
    path.write_text(json.dumps({"dspark": {r: {"temperatures": [4.0]} for r in ("exact", "rejection")}}))
    for calibration, wanted in (("auto", Calibration(Scaling((4.0,)))), ("off", Calibration())):
        with open_llm(v4.path, "dspark", plugins={"spec_decode": {"calibration": calibration}}) as llm:
            drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
            assert drafter._calibration == wanted


@pytest.mark.parametrize("missing", ["", "no/such/drafts.jsonl"])
def test_records_are_refused_where_they_cannot_be_written(tmp_path: Path, missing: str) -> None:
    """A folder, or a file in none: when the drafter is made, not once for each draft."""
    with pytest.raises(ConfigError, match=r"^plugins\.spec_decode\.record_file = '.*': cannot be written"):
        NGramDrafter(Settings(record_file=str(tmp_path / missing)))


def test_a_draft_model_is_calibrated_beside_its_own_checkpoint(tmp_path: Path) -> None:
    target = write_toy(tmp_path / "target", "PrefixHash", tokenizer=True)
    drafts = write_toy(tmp_path / "drafts", "PrefixHash", tokenizer=True, groups={"near": 7})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nfoo bar\n", encoding="utf-8")
    options = ["--method", "draft_model", "--model", str(target), "--drafter", str(drafts), "--prompts", str(prompts)]
    options += ["--max-tokens", "12", "--temperature", "0.3", "--draft-tokens", "3"]
    environ = {"DEEPINFER_PLUGINS__PATHS": "toys.plugin", "DEEPINFER_KV_CACHE__BLOCK_SIZE": "4"}
    result = CliRunner().invoke(program, ["calibrate-drafter", *options], env=environ, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    path = drafts / "drafter_calibration.json"
    assert set(json.loads(path.read_text())["draft_model"]) == {"exact", "rejection", "greedy"}
    path.write_text(json.dumps({"draft_model": {r: {"temperatures": [4.0]} for r in ("exact", "rejection")}}))
    more = {"plugins__paths": ["toys.plugin"], "plugins__spec_decode__draft_model": str(drafts)}
    with open_toy(target, speculation__method="draft_model", **more) as llm:
        drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
        assert drafter._calibration == Calibration(Scaling((4.0,)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "/no/such/o.json"], "--out /no/such/o.json: its folder does not exist"),
        (["--out", "/"], "--out /: is a folder: name a file in it, as /drafter_calibration.json"),
        (["--drafter", "no-such"], "--drafter no-such: is no directory to put drafter_calibration.json in: name one"),
        (["--plot", "/no/such/p.png"], "--plot /no/such/p.png: its folder does not exist"),
        (["--plot", "p.xyz"], "--plot p.xyz: expected a file name that ends in one of"),
        (["--draft-tokens", "0"], "'--draft-tokens': 0 is not in the range"),
        (["--max-tokens", "0"], "'--max-tokens': 0 is not in the range"),
        (["--temperature", "0"], "'--temperature': 0.0 is not in the range x>0"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n", encoding="utf-8")
    assert main(["calibrate-drafter", "--model", str(tmp_path), "--prompts", str(prompts), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


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
