"""What the engine owes a drafter, and what a drafter cannot do to a request."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog
from toys.checkpoints import ToyLLM, open_toy, write_toy
from toys.checks import assert_clean, ids_of
from toys.drafters import TOLD, Garbage, check_drafter, drafter_of, drafting
from toys.oracle import HashOracle, count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, PlanError, PluginError

ORACLE = HashOracle(64, [None])
PROMPTS = [[i] * (i + 1) for i in range(6)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


# ---- what it is shown


def test_it_is_shown_each_completion_about_to_decode(toy_llm: ToyLLM) -> None:
    """From the prompt's first token on, with all tokens so far and never more room than there is."""
    llm = toy_llm("Count", **drafting("silent", max_draft_tokens=3))
    llm.generate([[5], [9, 10]], [greedy(6), greedy(3)])
    drafter = drafter_of(llm)
    assert drafter.wrong == []
    by_request = {i: [length for (request, _), length in drafter.shown if request == i] for i in ("0", "1")}
    assert by_request == {"0": [2, 3, 4, 5], "1": [3]}  # the last token needs no draft


@pytest.mark.parametrize("most", [1, 3, 7])
def test_drafts_are_cut_to_the_setting_and_to_the_room_left(toy_llm: ToyLLM, most: int) -> None:
    llm = toy_llm("Count", **drafting("excessive", knows="count", max_draft_tokens=most))
    assert ids_of(llm.generate([[5]], greedy(20))) == [count_tokens([5], 20, 64)]
    left, expected = 19, []
    while left > 1:
        expected.append(min(most, left - 1))
        left -= expected[-1] + 1
    assert [v.proposed for v in drafter_of(llm).heard] == expected
    check_drafter(llm)


# ---- what it is told


def test_verdicts_name_exactly_the_committed_tokens(toy_llm: ToyLLM) -> None:
    """Joined they are the output but for the first token, and for those of steps without drafts."""
    llm = toy_llm("PrefixHash", **drafting("toy", knows="hash", right=2, depth=4))
    outputs = llm.generate(PROMPTS, greedy(22))
    for output in outputs:
        heard = [v for v in drafter_of(llm).heard if v.request_id == output.request_id]
        joined = [token for verdict in heard for token in verdict.tokens]
        ids = output.outputs[0].token_ids
        assert joined == ids[1 : 1 + len(joined)]
        assert len(joined) >= len(ids) - 2
        assert [len(v.tokens) for v in heard] == [v.accepted + 1 for v in heard]
    check_drafter(llm)


@pytest.mark.parametrize("stop_at", [3, 4, 5, 6, 7, 8])
def test_a_verdict_ends_where_the_completion_ends(toy_llm: ToyLLM, stop_at: int) -> None:
    """Drafts after a stop were right, and came to nothing."""
    llm = toy_llm("Count", **drafting("toy", knows="count", depth=6))
    llm.generate([[1]], greedy(20, stop_token_ids=[stop_at]))
    (verdict,) = drafter_of(llm).heard
    assert (verdict.proposed, verdict.accepted) == (6, 6)
    assert list(verdict.tokens) == list(range(3, stop_at + 1))


def test_a_row_without_a_token_is_no_committed_token(toy_llm: ToyLLM) -> None:
    llm: Any = toy_llm("Count", **drafting("toy", knows="count", depth=6))

    def after(logits: Any) -> Any:
        logits[logits[:, 12] == logits.amax(dim=1)] = float("nan")
        return logits

    llm.engine.model.after = after
    (output,) = llm.generate([[8]], greedy(20))
    assert output.outputs[0].token_ids == [9, 10, 11]
    assert output.error is not None
    assert output.error.code == "nan_logits"
    (verdict,) = drafter_of(llm).heard
    assert (verdict.proposed, verdict.accepted, list(verdict.tokens)) == (6, 2, [10, 11])
    assert_clean(llm)


def test_a_nan_in_a_rejected_row_harms_nobody(toy_llm: ToyLLM) -> None:
    """The wrong draft leads to NaN; the token in its place does not."""
    llm: Any = toy_llm("Count", **drafting("early", knows="count", depth=5, right=1, token=40))

    def after(logits: Any) -> Any:
        logits[logits[:, 41] == logits.amax(dim=1)] = float("nan")
        return logits

    llm.engine.model.after = after
    outputs = llm.generate([[8], [20]], greedy(15))
    assert ids_of(outputs) == [count_tokens([8], 15, 64), count_tokens([20], 15, 64)]
    assert all(verdict.accepted <= 1 for verdict in drafter_of(llm).heard)


def test_each_completion_is_forgotten_once(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", **drafting("varying", knows="hash"))
    outputs = llm.generate(PROMPTS, [greedy(9, n=1 + i % 3) for i in range(6)])
    expected = Counter((o.request_id, c.index) for o in outputs for c in o.outputs)
    assert Counter(drafter_of(llm).forgotten) == expected
    check_drafter(llm)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_aborted_completion_is_forgotten_once(toy_llm: ToyLLM, steps: int) -> None:
    llm = toy_llm("PrefixHash", **drafting("varying", knows="hash"))
    core = llm.engine.core
    request = llm.engine.intake.request("mine", PROMPTS[3], greedy(60), now=0.0, stream=False)
    core.add([request])
    for _ in range(steps):
        core.step()
    core.abort(["mine"])
    core.abort(["mine"])
    core.drain()
    assert drafter_of(llm).forgotten == [("mine", 0)]
    check_drafter(llm)
    assert_clean(llm)


def test_a_preempted_completion_is_forgotten_each_time(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9, **drafting("varying", knows="hash"))
    outputs = llm.generate(PROMPTS, greedy(20))
    assert ids_of(outputs) == [ORACLE.tokens(prompt, 20) for prompt in PROMPTS]
    assert sum(o.metrics.preemptions for o in outputs) > 0
    expected = Counter({(o.request_id, 0): 1 + o.metrics.preemptions for o in outputs})
    assert Counter(drafter_of(llm).forgotten) == expected
    check_drafter(llm)


def test_a_lost_step_counts_no_drafts(toy_llm: ToyLLM) -> None:
    """Out of memory while drafts are verified: forgotten, run again, and only the second verdict counts."""
    llm: Any = toy_llm("Count", **drafting("toy", knows="count", depth=4))
    steps = []

    def before(batch: Any) -> None:
        steps.append(batch)
        if len(steps) == 2:
            raise MemoryError

    llm.engine.model.before = before
    (output,) = llm.generate([[5]], greedy(6))
    assert output.outputs[0].token_ids == count_tokens([5], 6, 64)
    assert drafter_of(llm).forgotten == [("0", 0)] * 2
    assert output.metrics.proposed_drafts == llm.engine.core.speculator.proposed <= 4
    check_drafter(llm)
    assert_clean(llm)


# ---- usage


def test_counters(toy_llm: ToyLLM) -> None:
    """Per request and in all; a step yields its right drafts and one token more."""
    llm = toy_llm("Count", **drafting("toy", knows="count", right=2, depth=4))
    outputs = llm.generate([[5], [40]], [greedy(10), greedy(4)])
    # The first: 9 tokens after the prompt's, 3 a step: drafts of 4, 4 and 2 tokens. The second: 2, both right.
    assert [(o.metrics.proposed_drafts, o.metrics.accepted_drafts) for o in outputs] == [(10, 6), (2, 2)]
    speculator = llm.engine.core.speculator
    assert speculator is not None
    assert (speculator.proposed, speculator.accepted, speculator.failures) == (12, 8, 0)
    assert [o.metrics.output_tokens for o in outputs] == [10, 4]


def test_all_completions_of_a_request_count(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **drafting("toy", knows="count", depth=4))
    (output,) = llm.generate([[5]], greedy(6, n=3))
    assert (output.metrics.proposed_drafts, output.metrics.accepted_drafts) == (12, 12)


def test_a_step_brings_no_tokens_past_an_end(toy_llm: ToyLLM) -> None:
    """What steps report as output adds up to the outputs, stops and all."""
    llm = toy_llm("Count", **drafting("toy", knows="count", depth=6))
    core, params = llm.engine.core, greedy(20, stop_token_ids=[9, 30])
    core.add([llm.engine.intake.request(str(i), [i], params, now=0.0, stream=False) for i in (1, 2, 20, 50)])
    total = 0
    while core.has_unfinished:
        total += core.step().output_tokens
    assert total == 8 + 7 + 10 + 20


def test_fewer_steps(toy_llm: ToyLLM) -> None:
    plain: Any = toy_llm("Count")
    llm: Any = toy_llm("Count", **drafting("toy", knows="count", depth=7, max_draft_tokens=7))
    for each in (plain, llm):
        each.generate([[5]], greedy(33))
    assert (plain.engine.model.steps, llm.engine.model.steps) == (33, 1 + 4)


# ---- bad drafters


@pytest.mark.parametrize("method", ["raising", "garbage"])
def test_failures_cost_drafts_only(toy_llm: ToyLLM, method: str) -> None:
    llm = toy_llm("PrefixHash", **drafting(method, knows="hash", every=2))
    with structlog.testing.capture_logs() as logs:
        outputs = llm.generate(PROMPTS, greedy(20))
    assert ids_of(outputs) == [ORACLE.tokens(prompt, 20) for prompt in PROMPTS]
    speculator = llm.engine.core.speculator
    assert speculator is not None
    assert speculator.failures > 0
    assert sum(entry["event"] == "drafter raised" for entry in logs) == speculator.failures
    if method == "garbage":
        assert speculator.proposed == 0
        assert drafter_of(llm).calls > Garbage.answers
    else:
        assert speculator.accepted > 0
    check_drafter(llm)
    assert_clean(llm)


def test_a_raising_forget_is_called_no_less(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", **drafting("raising", knows="hash", every=1))
    llm.generate(PROMPTS, greedy(5))
    assert sorted(drafter_of(llm).forgotten) == [(str(i), 0) for i in range(6)]
    assert_clean(llm)


def test_ids_outside_the_vocabulary_end_a_draft(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", logging__level="warning", **drafting("outside", knows="hash", right=2, depth=6))
    with structlog.testing.capture_logs() as logs:
        outputs = llm.generate(PROMPTS, greedy(21))
    assert ids_of(outputs) == [ORACLE.tokens(prompt, 21) for prompt in PROMPTS]
    assert {v.proposed for v in drafter_of(llm).heard} == {1, 2}
    assert all(v.accepted == v.proposed for v in drafter_of(llm).heard)
    named = {entry["token"] for entry in logs if entry["event"] == "drafter proposed an id outside the vocabulary"}
    assert named == {-1, 10**6, -(2**31), 64, 2**40}


def test_ids_of_the_padded_vocabulary_are_outside(toy_llm: ToyLLM) -> None:
    """The model has 320 logits, the tokenizer 261 ids."""
    llm = toy_llm("Count", tokenizer=True, count_mod=256, **drafting("early", knows="count", right=1, token=261))
    (output,) = llm.generate([[5]], greedy(9))
    assert output.outputs[0].token_ids == count_tokens([5], 9, 256)
    assert {v.proposed for v in drafter_of(llm).heard} == {1}


@pytest.mark.parametrize("confidence", ["none", "zero", "one", "nan", "random", "short", "text"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_changes_no_token(toy_llm: ToyLLM, confidence: str, temperature: float) -> None:
    llm = toy_llm("PrefixHash", **drafting("varying", confidence=confidence))
    texts = [ORACLE.tokens(prompt, 16, temperature=temperature, seed=8) for prompt in PROMPTS]
    TOLD.update({(str(i), 0): PROMPTS[i] + texts[i] for i in range(6)})
    assert ids_of(llm.generate(PROMPTS, SamplingParams(temperature=temperature, seed=8, max_tokens=16))) == texts
    check_drafter(llm)


# ---- settings and plan


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "hash", "PrefixHash")


def test_no_draft_tokens_is_no_speculation(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", **drafting("toy", knows="hash", max_draft_tokens=0))
    assert llm.engine.core.speculator is None
    assert ids_of(llm.generate(PROMPTS, greedy(8))) == [ORACLE.tokens(prompt, 8) for prompt in PROMPTS]


def test_no_method_is_no_speculation(toy: Path) -> None:
    paths = ["toys.plugin", "toys.drafter_plugin"]
    with open_toy(toy, plugins__paths=paths) as llm:
        assert llm.engine.core.speculator is None
        assert llm.engine.planned.plan.drafter is None


def test_the_plan_names_the_drafter(toy: Path) -> None:
    for method in ("varying", "drafter_plugin:varying"):
        with open_toy(toy, **drafting(method)) as llm:
            assert llm.engine.planned.plan.drafter == "drafter_plugin:varying"


def test_an_unknown_method_names_the_nearest(toy: Path) -> None:
    with pytest.raises(PluginError, match=r"drafter 'varyin'; did you mean 'varying'\?"):
        open_toy(toy, **drafting("varyin"))


def test_an_unknown_setting_of_the_drafter(toy: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.drafter_plugin\.dept.*depth"):
        open_toy(toy, **drafting("toy", dept=3))


def test_a_setting_of_the_wrong_type(toy: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.drafter_plugin\.depth = 'deep'"):
        open_toy(toy, **drafting("toy", depth="deep"))


def test_a_negative_number_of_drafts(toy: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.max_draft_tokens"):
        open_toy(toy, **drafting("toy", max_draft_tokens=-1))


UNVERIFIED = """
import attrs
from toys import stage_plugin
from toys.stage_plugin import deepinfer_plugin, deepinfer_sampling_stages
from deepinfer_core.api import hookimpl

@hookimpl
def deepinfer_sampling(device):
    return [attrs.evolve(p, caps=frozenset({"device_state"})) for p in stage_plugin.deepinfer_sampling(device)]
"""


def test_a_sampling_stage_that_cannot_verify_is_refused(toy: Path, tmp_path: Path) -> None:
    """Several rows of one slot in a step: a provider must say that it is right for those."""
    file = tmp_path / "unverified.py"
    file.write_text(UNVERIFIED)
    paths = ["toys.plugin", "toys.drafter_plugin", str(file)]
    open_toy(toy, plugins__paths=paths).close()
    with pytest.raises(PlanError, match="spec_verify"):
        open_toy(toy, **with_stage(str(file), drafting("toy")))


def test_a_sampling_stage_that_can_verify(toy: Path) -> None:
    params = [greedy(9, extra_args={"ban_below": bound}) for bound in (0, 20, 40)]
    with open_toy(toy, plugins__paths=["toys.plugin", "toys.stage_plugin"]) as plain:
        expected = ids_of(plain.generate(PROMPTS[:3], params))
    assert min(expected[2]) >= 40
    with open_toy(toy, **with_stage("toys.stage_plugin", drafting("varying"))) as llm:
        TOLD.update({(str(i), 0): PROMPTS[i] + expected[i] for i in range(3)})
        assert ids_of(llm.generate(PROMPTS[:3], params)) == expected


def with_stage(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "plugins__paths": [*settings["plugins__paths"], path]}


# ---- a step left in flight


def test_no_drafts_while_a_token_is_unknown(toy_llm: ToyLLM) -> None:
    """Something may leave a launched step behind; the drafter is not asked about its completions."""
    llm: LLM = toy_llm("Count", **drafting("toy", knows="count", depth=3))
    core = llm.engine.core
    request = llm.engine.intake.request("mine", [5], greedy(12), now=0.0, stream=False)
    core.add([request])
    core.step()
    plan = core.planner.plan()
    assert plan is not None
    core._launched.append(core.runner.launch(plan))
    core.observer.launched(plan, 0.0, 0.0)
    while core.has_unfinished:
        core.step()
    assert llm.output(request).outputs[0].token_ids == count_tokens([5], 12, 64)
    assert drafter_of(llm).shown == []
    check_drafter(llm)
    assert_clean(llm)
