"""What the feature asks of a plan, and what a plan says about it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint, tiny_qwen3, tiny_v4
from click.testing import CliRunner
from invariance import CAP, providers

from deepinfer_core.api import PARTS, PlanError
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.cli.program import program
from deepinfer_core.config import load_config
from deepinfer_core.engine.planning import PlannedEngine, make_plan
from deepinfer_core.plugins import explain_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[tiny_qwen3, tiny_v4], ids=["qwen3", "v4"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    checkpoint: Checkpoint = request.param(tmp_path_factory.mktemp("plan") / "model")
    return checkpoint


def plan(checkpoint: Checkpoint, environ: dict[str, str] | None = None, **settings: Any) -> PlannedEngine:
    overrides = {"model.path": checkpoint.path, **{key.replace("__", "."): v for key, v in settings.items()}}
    with open_checkpoint(checkpoint.path) as opened:
        return make_plan(load_config(overrides=overrides, environ=environ or {}), opened, {})


def test_every_operator_has_a_provider_and_a_proof(tiny: Checkpoint) -> None:
    rows = [row for row in explain_plan(plan(tiny, features__batch_invariant=True).plan) if row["provider"] != PARTS]
    asked = [row for row in rows if CAP in row["demands"]]
    assert len(asked) == len([row for row in rows if not row["op"].startswith("kv_layout.")])
    assert all(row["proof"] for row in asked)


def test_without_a_demand_no_proof_is_shown(tiny: Checkpoint) -> None:
    assert not any(row["proof"] for row in explain_plan(plan(tiny).plan))


def test_the_environment_asks_for_it(tiny: Checkpoint) -> None:
    planned = plan(tiny, {"DEEPINFER_BATCH_INVARIANT": "1"})
    assert planned.plan.features == (CAP,)
    assert any(choice.provider == "batch_invariance:linear" for choice in planned.plan.choices)


def test_installing_the_plugin_changes_no_choice(tiny: Checkpoint) -> None:
    with_plugin, without = plan(tiny), plan(tiny, plugins__block=("batch_invariance",))
    chosen = [[(c.slot, c.provider, c.score) for c in p.plan.choices] for p in (with_plugin, without)]
    assert chosen[0] == chosen[1]


def test_without_the_plugin_the_operator_and_the_package_are_named(tiny: Checkpoint) -> None:
    with pytest.raises(PlanError) as refused:
        plan(tiny, features__batch_invariant=True, plugins__block=("batch_invariance",))
    text = str(refused.value)
    assert "(pointwise." in text
    assert "deepinfer-batch-invariance" in text
    assert "\n" not in text


def test_a_provider_without_the_cap_cannot_be_forced(tiny: Checkpoint) -> None:
    with pytest.raises(PlanError, match=r"cpu:packed_linear: lacks: batch_invariant"):
        plan(tiny, features__batch_invariant=True, ops={"gemm.linear": ("cpu:packed_linear",)})


def test_explain_prints_the_proofs(tiny: Checkpoint) -> None:
    result = CliRunner().invoke(program, ["explain", "--model", tiny.path, "--set", "features.batch_invariant=true"])
    assert result.exit_code == 0
    assert "tests/batch_invariance/test_gemm.py::test_rows_alone_and_together" in result.stdout
    plain = CliRunner().invoke(program, ["explain", "--model", tiny.path])
    assert "proof" not in plain.stdout


def test_a_claim_without_a_test_is_shown_as_one(tiny: Checkpoint) -> None:
    """By a provider of somebody else, which the user asked for."""
    ops = {"pointwise.rms_norm": ("false_plugin:blocked",)}
    planned = plan(tiny, features__batch_invariant=True, plugins__paths=("false_plugin",), ops=ops)
    rows = {row["slot"]: row["proof"] for row in explain_plan(planned.plan) if row["op"] == "pointwise.rms_norm"}
    assert set(rows.values()) == {"batch_invariant: claimed, no test named"}
    (objection,) = planned.objections
    assert objection.startswith("features.batch_invariant: false_plugin:blocked claims batch_invariant for ")
    assert all(slot in objection for slot in rows)
    without = plan(tiny, plugins__paths=("false_plugin",), ops=ops)
    assert not without.objections
    assert not any(row["proof"] for row in explain_plan(without.plan))


def test_what_is_installed_claims_nothing_without_a_test(tiny: Checkpoint) -> None:
    assert not plan(tiny, features__batch_invariant=True).objections


@pytest.mark.parametrize("label", sorted(f"{owner}:{p.name}" for owner, p in providers() if CAP in p.caps))
def test_every_declared_proof_is_a_test(label: str) -> None:
    (proof,) = {p.proofs[CAP] for owner, p in providers() if f"{owner}:{p.name}" == label and CAP in p.caps}
    file, _, name = proof.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
