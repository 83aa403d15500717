"""A20 (sgl-project/sglang#34149): an abort at any moment exposes nothing afterwards and gives everything back."""

from __future__ import annotations

from typing import Any

import pytest
from toys.checkpoints import ToyLLM
from toys.checks import assert_clean, ids_of
from toys.oracle import HashOracle

from deepinfer_core import SamplingParams

PROMPT = [(3 * i) % 64 for i in range(12)]  # three chunks of four
NEIGHBOUR = [63, 62]
ORACLE = HashOracle(64, [None])
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize("steps", range(16))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("neighbour", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_abort_after_any_number_of_steps(
    toy_llm: ToyLLM, ahead: bool, neighbour: bool, stream: bool, steps: int
) -> None:
    llm: Any = toy_llm("PrefixHash", scheduling__max_batch_tokens=4, scheduling__async_scheduling=ahead)
    core, intake = llm.engine.core, llm.engine.intake
    request = intake.request("target", PROMPT, GREEDY, now=0.0, stream=stream)
    other = intake.request("other", NEIGHBOUR, GREEDY, now=0.0, stream=False)
    core.add([other, request] if neighbour else [request])
    for _ in range(steps):
        core.step()
    over = request.finished
    before = llm.output(request).outputs[0].token_ids
    deltas = len(request.outbox)
    ended = [*core.abort(["target"]).finished, *core.abort(["target"]).finished]
    assert ended == ([] if over else [request])
    for _ in range(60):
        core.step()
    assert not core.has_unfinished
    result = llm.output(request).outputs[0]
    assert result.token_ids == before == ORACLE.tokens(PROMPT, 8)[: len(before)]
    assert result.finish_reason == ("length" if over else "abort")
    if stream:
        assert [delta.finish_reason for delta in request.outbox if delta.finish_reason] == [result.finish_reason]
        assert [token for delta in request.outbox for token in delta.token_ids] == before
        assert len(request.outbox) == deltas + (not over)
    if neighbour:
        assert llm.output(other).outputs[0].token_ids == ORACLE.tokens(NEIGHBOUR, 8)
    assert_clean(llm)
    assert ids_of(llm.generate([PROMPT, NEIGHBOUR], GREEDY)) == [ORACLE.tokens(p, 8) for p in (PROMPT, NEIGHBOUR)]
    assert_clean(llm)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@pytest.mark.parametrize("steps", range(6))
def test_only_blocks_that_were_computed_are_served(toy_llm: ToyLLM, ahead: bool, steps: int) -> None:
    llm: Any = toy_llm("PrefixHash", scheduling__max_batch_tokens=4, scheduling__async_scheduling=ahead)
    core, rows = llm.engine.core, [0]

    def count(batch: Any) -> None:
        rows[0] += len(batch.positions)

    llm.engine.model.before = count
    request = llm.engine.intake.request("target", PROMPT, GREEDY, now=0.0, stream=False)
    core.add([request])
    for _ in range(steps):
        core.step()
    core.abort(["target"])
    core.drain()
    llm.engine.model.before = lambda batch: None
    (output,) = llm.generate([PROMPT], GREEDY)
    assert output.metrics.cached_tokens <= rows[0]
    assert output.outputs[0].token_ids == ORACLE.tokens(PROMPT, 8)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_an_id_can_be_used_again_at_once(toy_llm: ToyLLM, ahead: bool) -> None:
    llm: Any = toy_llm("PrefixHash", scheduling__max_batch_tokens=4, scheduling__async_scheduling=ahead)
    core, intake = llm.engine.core, llm.engine.intake
    for steps in range(5):
        first, second = (intake.request("same", p, GREEDY, now=0.0, stream=False) for p in (PROMPT, NEIGHBOUR))
        core.add([first])
        for _ in range(steps):
            core.step()
        core.abort(["same"])
        core.add([second])
        while core.has_unfinished:
            core.step()
        assert llm.output(first).outputs[0].finish_reason == "abort"
        assert llm.output(second).outputs[0].token_ids == ORACLE.tokens(NEIGHBOUR, 8)
    assert_clean(llm)
