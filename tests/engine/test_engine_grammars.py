"""Grammars in the engine, with a compiler whose every mask is right by construction."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from toys import grammar_plugin
from toys.checkpoints import EOS_ID, ToyLLM
from toys.checks import assert_clean, facts, ids_of

from deepinfer_core import LLM, RequestOutput, SamplingParams
from deepinfer_core.api import InvalidRequestError

PLUGINS = ["toys.plugin", "toys.grammar_plugin"]
PATTERNS = (
    r"[0-9]{3}-[0-9]{2}",
    r"(yes|no|maybe)",
    r"[xy]+z",
    r'\{"key": "[a-f]{0,4}"\}',
    r"(cat|dog)( (cat|dog)){0,3}",
)


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def grammar_llm(toy_llm: ToyLLM, kind: str = "Flat", **settings: Any) -> LLM:
    own = {"plugins__paths": PLUGINS, "structured_outputs__backend": "grammar_plugin:patterns"}
    return toy_llm(kind, tokenizer=True, **{**own, **settings})


def pattern(text: str, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "structured_outputs": {"regex": text}, **params})


def error_of(output: RequestOutput) -> tuple[str, str]:
    assert output.error is not None
    assert output.outputs[0].finish_reason == "error"
    return output.error.code, output.error.message


# ---- what is generated


def test_every_text_matches(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    params = [pattern(PATTERNS[i % 5], seed=i, temperature=1 + i % 3 / 2) for i in range(60)]
    outputs = llm.generate([[i] for i in range(60)], params)
    for output, one in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        assert one.structured_outputs is not None
        if completion.finish_reason == "stop":
            assert re.fullmatch(one.structured_outputs.text, completion.text)
        else:
            assert one.structured_outputs.text == "[xy]+z"
            assert re.fullmatch("[xy]{60}", completion.text)
    assert_clean(llm)
    assert llm.engine.core.constraints is not None
    assert llm.engine.core.constraints.pool.misses == len(PATTERNS)


def test_ahead_and_sync_give_the_same_tokens_and_neighbours_are_not_touched(toy_llm: ToyLLM) -> None:
    prompts = [[i, i + 1] for i in range(12)]
    free = [SamplingParams(max_tokens=9, seed=i, logprobs=2, presence_penalty=0.5) for i in range(12)]
    mixed = [pattern(PATTERNS[i % 5], seed=i, frequency_penalty=0.7) if i % 2 else free[i] for i in range(12)]
    results = []
    for ahead in (False, True):
        llm = grammar_llm(toy_llm, "PrefixHash", scheduling__async_scheduling=ahead)
        alone = [facts(output) for output in llm.generate(prompts, free)]
        results.append([facts(output) for output in llm.generate(prompts, mixed)])
        assert results[-1][::2] == alone[::2]
    assert results[0] == results[1]


def test_a_row_keeps_only_what_the_grammar_leaves(toy_llm: ToyLLM, ahead: bool) -> None:
    """Padded ids lead by far; then the end; then a letter outside the grammar."""
    logits = {"300": 9.0, "319": 8.0, "261": 7.0, str(EOS_ID): 6.0, str(ord("c")): 5.0, str(ord("b")): 1.0}
    llm = grammar_llm(toy_llm, "Const", logits=logits, scheduling__async_scheduling=ahead)
    greedy = pattern("[ab]{2,}", temperature=0, max_tokens=5)
    (output,) = llm.generate([[1]], greedy)
    assert output.outputs[0].token_ids == [ord("b"), ord("b"), EOS_ID]
    assert output.outputs[0].finish_reason == "stop"


# ---- the end


def test_a_finished_grammar_ends_the_request_without_an_end_token(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 20}):
        (output,) = llm.generate([[1]], pattern("xyx", **more))
        (completion,) = output.outputs
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("xyx", "stop", None)
        assert EOS_ID not in completion.token_ids


def test_ignore_eos_goes_on_while_anything_else_is_legal(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, "Const", logits={str(EOS_ID): 9.0, "97": 1.0}, scheduling__async_scheduling=ahead)
    (output,) = llm.generate([[1]], pattern("a{2,7}", ignore_eos=True, temperature=0))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a" * 7, "stop")


def test_min_tokens_holds_back_the_end_of_a_text_that_could_go_on(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, "Const", logits={str(EOS_ID): 9.0, "97": 1.0}, scheduling__async_scheduling=ahead)
    (output,) = llm.generate([[1]], pattern("a{1,7}", min_tokens=4, temperature=0))
    assert output.outputs[0].token_ids == [97] * 4 + [EOS_ID]


def test_a_stop_string_and_a_limit_still_end_a_text(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    stopped, limited = llm.generate([[1], [2]], [pattern("x{30}", stop=["xxx"]), pattern("x{30}", max_tokens=5)])
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("", "stop")
    assert (limited.outputs[0].text, limited.outputs[0].finish_reason) == ("xxxxx", "length")
    assert_clean(llm)


# ---- jumping forward


def test_tokens_without_an_alternative_take_no_step_of_their_own(toy_llm: ToyLLM, ahead: bool) -> None:
    long = r"<longkeylongkeylongkey>[0-9]</longkeylongkey>"
    found, steps = [], []
    for most in (0, 7, 32):
        llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead, structured_outputs__jump_forward=most)
        before = llm.engine.model.steps  # type: ignore[attr-defined]
        outputs = llm.generate([[i] for i in range(4)], [pattern(long, seed=i, logprobs=1) for i in range(4)])
        steps.append(llm.engine.model.steps - before)  # type: ignore[attr-defined]
        found.append([facts(output) for output in outputs])
        forced = sum(output.metrics.forced_tokens for output in outputs)
        assert (forced > 0) == (most > 0)
        assert all(output.metrics.proposed_drafts == 0 for output in outputs)
        assert_clean(llm)
    assert found[0] == found[1] == found[2]
    assert steps[0] > 2 * steps[1]
    assert steps[1] >= steps[2]


@pytest.mark.parametrize("drafter", ["varying", "toy", "outside", "excessive", "raising", "garbage"])
def test_a_drafter_changes_nothing(toy_llm: ToyLLM, drafter: str) -> None:
    prompts = [[i, i] for i in range(10)]
    params = [pattern(PATTERNS[i % 5], seed=i, temperature=i % 2, repetition_penalty=1.3) for i in range(10)]
    plain = [facts(output) for output in grammar_llm(toy_llm, "PrefixHash").generate(prompts, params)]
    llm = grammar_llm(
        toy_llm,
        "PrefixHash",
        plugins__paths=[*PLUGINS, "toys.drafter_plugin"],
        speculation__method=drafter,
        speculation__max_draft_tokens=4,
        plugins__drafter_plugin={"knows": "hash", "vocab": 320},
    )
    assert [facts(output) for output in llm.generate(prompts, params)] == plain
    assert llm.engine.core.speculator is not None
    assert getattr(llm.engine.core.speculator.drafter, "wrong", []) == []
    assert_clean(llm)


def test_preempted_requests_go_on_where_they_were(toy_llm: ToyLLM, ahead: bool) -> None:
    prompts = [[i] * 6 for i in range(8)]
    params = [pattern(r"([a-d]{5}-){4}[a-d]{5}", seed=i) for i in range(8)]
    roomy = [facts(output) for output in grammar_llm(toy_llm, "PrefixHash").generate(prompts, params)]
    llm = grammar_llm(toy_llm, "PrefixHash", kv_cache__num_blocks=15, scheduling__async_scheduling=ahead)
    outputs = llm.generate(prompts, params)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert [facts(output) for output in outputs] == roomy
    assert_clean(llm)


def test_each_completion_has_a_state_of_its_own(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    (output,) = llm.generate([[1, 2]], pattern("[a-z]{4}[0-9]", n=6, seed=3))
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{4}[0-9]", text) for text in texts)
    assert len(set(texts)) == 6


# ---- compiling


@pytest.fixture
def release() -> Iterator[Any]:
    grammar_plugin.RELEASE.clear()
    yield grammar_plugin.RELEASE
    grammar_plugin.RELEASE.set()


def test_a_request_waits_for_its_grammar_while_others_run(toy_llm: ToyLLM, ahead: bool, release: Any) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead)
    found: list[str] = []
    stream = llm.stream([1], pattern("(?#hang)ok"))
    reader = threading.Thread(target=lambda: found.extend(delta.text for delta in stream))
    reader.start()
    (other,) = llm.generate([[2]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(other.outputs[0].token_ids) == 5
    assert found == []
    release.set()
    reader.join(20)
    assert "".join(found) == "ok"
    assert_clean(llm)


def test_why_a_request_waits_and_how_its_wait_ends(toy_llm: ToyLLM, release: Any) -> None:
    llm = grammar_llm(toy_llm)
    core, intake = llm.engine.core, llm.engine.intake
    hung, same, free = (
        intake.request(name, [3], params, now=core.clock(), stream=False)
        for name, params in (("hung", pattern("(?#hang)a")), ("same", pattern("(?#hang)a")), ("free", SamplingParams()))
    )
    core.add([hung, same, free])
    while not free.finished:
        core.step()
    assert llm.why_waiting("hung") is not None
    assert "its grammar" in str(llm.why_waiting("hung"))
    core.abort(["hung"])
    assert hung.finished
    release.set()
    while not same.finished:
        core.step()
    assert llm.output(same).outputs[0].text == "a"
    assert core.constraints is not None
    assert (core.constraints.pool.misses, core.constraints.pool.hits) == (1, 1)
    assert_clean(llm)


def test_compiling_for_too_long_ends_the_request_and_the_next_one_compiles(toy_llm: ToyLLM, release: Any) -> None:
    llm = grammar_llm(toy_llm, structured_outputs__compile_seconds=0.05, structured_outputs__compile_threads=1)
    bad, good = llm.generate([[1], [2]], [pattern("(?#hang)a"), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert error_of(bad) == ("constraint", "compiling took longer than structured_outputs.compile_seconds=0.05")
    assert len(good.outputs[0].token_ids) == 3
    (later,) = llm.generate([[1]], pattern("[ab]"))
    assert later.outputs[0].text in ("a", "b")


def test_a_time_limit_ends_a_request_that_waits(toy_llm: ToyLLM, release: Any) -> None:
    llm = grammar_llm(toy_llm)
    (output,) = llm.generate({"prompt_token_ids": [1], "timeout_ms": 30}, pattern("(?#hang)a"))
    assert error_of(output)[0] == "timeout"
    assert_clean(llm)


def test_compiled_grammars_are_kept_up_to_a_size(toy_llm: ToyLLM) -> None:
    llm = grammar_llm(toy_llm, structured_outputs__cache_bytes=250)
    for text in ("a", "b", "a", "c", "a", "b"):  # two fit: b went when c came
        llm.generate([[1]], pattern(text))
    assert llm.engine.core.constraints is not None
    compiler: Any = llm.engine.core.constraints.compiler()
    assert compiler.compiled == ["a", "b", "c", "b"]


# ---- failures


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(?#compile)a", "structured_outputs: compile fails as it was told to"),
        ("(unclosed", "structured_outputs: missing"),
        ("(?#start)a", "structured_outputs: start fails as it was told to"),
        ("(?#huge)a", "structured_outputs: the compiled grammar takes"),
        ("(?#fill)aaaa", "the grammar raised RuntimeError: fill fails as it was told to"),
        ("(?#accept)aaaa", "the grammar raised RuntimeError: accept fails as it was told to"),
    ],
)
def test_a_failure_ends_one_request(toy_llm: ToyLLM, ahead: bool, text: str, reason: str) -> None:
    prompts = [[i, 7] for i in range(6)]
    params = [
        pattern("[a-z]{9}", seed=i, logprobs=3) if i % 2 else SamplingParams(max_tokens=9, seed=i, logprobs=3)
        for i in range(6)
    ]
    llm = grammar_llm(toy_llm, "PrefixHash", scheduling__async_scheduling=ahead, structured_outputs__jump_forward=0)
    alone = [facts(output) for output in llm.generate(prompts, params)]
    *good, bad = llm.generate([*prompts, [9]], [*params, pattern(text)])
    assert [facts(output) for output in good] == alone
    code, message = error_of(bad)
    assert code == "constraint"
    assert message.startswith(reason)
    assert_clean(llm)


def test_an_empty_mask_ends_one_request(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = grammar_llm(toy_llm, scheduling__async_scheduling=ahead, structured_outputs__jump_forward=0)
    bad, good = llm.generate([[1], [2]], [pattern("(?#empty)aaaa"), pattern("aaaa")])
    assert error_of(bad) == ("no_allowed_token", "masks and bans left no token that could be generated")
    assert good.outputs[0].text == "aaaa"


def test_grammar_and_other_masks_that_leave_nothing(toy_llm: ToyLLM) -> None:
    llm = grammar_llm(toy_llm)
    bad, good = llm.generate([[1], [2]], [pattern("aaaa", allowed_token_ids=[98]), pattern("aaaa")])
    assert error_of(bad)[0] == "no_allowed_token"
    assert good.outputs[0].text == "aaaa"
    assert_clean(llm)


def test_what_no_plugin_can_do_is_refused_at_once(toy_llm: ToyLLM, tmp_path: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        toy_llm("Flat", plugins__paths=PLUGINS).generate([[1]], pattern("a"))
    llm = grammar_llm(toy_llm)
    with pytest.raises(InvalidRequestError, match="this compiler knows regular expressions only"):
        llm.generate([[1]], SamplingParams(structured_outputs={"json_object": True}))
    trigger = {"schema_type": "regex", "schema": "a", "trigger_token_ids": [400]}
    with pytest.raises(InvalidRequestError, match=r"so_args\['trigger_token_ids'\]: id 400: expected an id in"):
        llm.generate([[1]], SamplingParams(so_args=trigger))
    assert ids_of(llm.generate([[1]], pattern("a"))) == [[97]]


def test_many_threads_share_an_engine_with_grammars(toy_llm: ToyLLM) -> None:
    llm = grammar_llm(toy_llm)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: llm.generate([[i]], pattern("[ab]{3}", seed=i))[0], range(8)))
    assert all(re.fullmatch("[ab]{3}", output.outputs[0].text) for output in found)
    assert_clean(llm)
