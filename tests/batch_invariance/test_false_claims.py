"""A provider that declares batch invariance falsely is caught: by the operator suite, and by running a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import false_plugin
import pytest
import test_attention as attention
from checkpoints import Checkpoint, tiny_qwen3
from click.testing import CliRunner, Result
from invariance import check_company, context, normal

from deepinfer_core.api import LinearRequest, RmsNormRequest
from deepinfer_core.cli.program import program
from deepinfer_core.cpu.attention import PagedAttention

PAGES = {"kv_cache.block_size": 16}
"""The planted attention reads blocks that lie by token."""

SLOTS = {"split": {"qkv", "head"}, "blocked": {"norm", "head_norm"}, "two_ways": {"attention_full", "attention_window"}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "model")


def verify(checkpoint: Checkpoint, *arguments: str) -> Result:
    ids = ",".join(map(str, checkpoint.prompt(21)))
    sets = [f"--set={key}={json.dumps(value)}" for key, value in {**checkpoint.settings, **PAGES}.items()]
    command = ["verify-determinism", "--model", checkpoint.path, "--prompt-ids", ids, "--max-tokens", "20", *sets]
    return CliRunner().invoke(program, [*command, *arguments])


@pytest.mark.parametrize(("provider", "op"), false_plugin.operators().items())
def test_the_command_names_layer_operator_and_provider(tiny: Checkpoint, provider: str, op: str) -> None:
    sets = [f"ops={json.dumps({op: [f'false_plugin:{provider}']})}", 'plugins.paths=["false_plugin"]']
    result = verify(tiny, "--json", *(f"--set={text}" for text in sets))
    assert result.exit_code == 1, result.output
    moved = [r["moved"] for r in json.loads(result.stdout) if r["moved"] is not None]
    assert moved
    for found in moved:
        assert found["op"] == op
        assert found["provider"] == f"false_plugin:{provider}"
        assert found["slot"] in SLOTS[provider]
        assert found["position"] < 41


def test_the_command_says_it_in_a_line(tiny: Checkpoint) -> None:
    sets = ['--set=ops={"gemm.linear": ["false_plugin:split"]}', '--set=plugins.paths=["false_plugin"]']
    result = verify(tiny, *sets)
    assert result.exit_code == 1
    assert "runs differ; first at position 21, layer 0, qkv (gemm.linear), provider false_plugin:split" in result.stdout


def test_the_command_is_content_with_the_plugin(tiny: Checkpoint) -> None:
    result = verify(tiny, "--vary", "kv_cache.block_size=32")
    assert result.exit_code == 0, result.output
    assert "kv_cache.block_size=32: the same bits in" in result.stdout
    assert "preempted and resumed: the same bits in" in result.stdout
    assert result.stdout.endswith("no bit moved\n")


@pytest.mark.parametrize("arguments", [["--prompt-ids", "1,x"], ["--vary", "nothing"]])
def test_the_command_refuses_what_it_cannot_read(tiny: Checkpoint, arguments: list[str]) -> None:
    assert verify(tiny, *arguments).exit_code == 2


def test_a_setting_that_does_not_exist_is_known_before_anything_is_compared(tiny: Checkpoint) -> None:
    result = verify(tiny, "--vary", "scheduling.nope=1")
    assert result.exit_code != 0
    assert "nope" in str(result.exception) + result.output
    assert "the same bits" not in result.output


def test_a_text_needs_a_tokenizer(tiny: Checkpoint) -> None:
    result = CliRunner().invoke(program, ["verify-determinism", "--model", tiny.path])
    assert result.exit_code != 0
    assert "--prompt-ids" in str(result.exception)


def linear() -> None:
    request = LinearRequest(
        in_features=32, out_features=20, dtype="float32", out_dtype="float32", weight_dtype="float32"
    )
    op, x = false_plugin.SplitLinear(request, context()), normal(40, 32)
    weight = op.prepare([normal(20, 32, seed=1)])
    check_company(lambda picked: op.run(x[picked], weight), 40)


def norm() -> None:
    op = false_plugin.BlockedNorm(RmsNormRequest(hidden=32, eps=1e-6, dtype="float32"), context())
    x, weight = normal(40, 32), normal(32, seed=1)
    check_company(lambda picked: op.run(x[picked], weight), 40)


def paged() -> None:
    (request, over), _ = attention.CASES["paged"]
    op: Any = PagedAttention(request, context())  # type: ignore[arg-type]
    attention.check(op, over, [60, 33], 1)


@pytest.mark.parametrize("suite", [linear, norm, paged], ids=false_plugin.operators())
def test_the_operator_suite_fails(suite: Any) -> None:
    with pytest.raises(AssertionError, match="moved"):
        suite()


def test_a_written_report_survives(tiny: Checkpoint, tmp_path: Path) -> None:
    """Numbers of what was compared are in the report, so that a run that compared nothing shows."""
    result = verify(tiny, "--json", "--no-watch")
    assert result.exit_code == 0
    reports = json.loads(result.stdout)
    assert all(report["runs"] > 0 and report["results"] == 0 and report["happened"] for report in reports)
