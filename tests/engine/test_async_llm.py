"""AsyncLLM: many tasks on one engine, each unaffected by what happens to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import SMALL, write_toy
from toys.oracle import count_tokens

from deepinfer_core import AsyncLLM, SamplingParams
from deepinfer_core.api import InvalidRequestError
from deepinfer_core.engine.outputs import StreamDelta


def run(directory: Path, body: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        settings = {**SMALL, **{key.replace("__", "."): value for key, value in options.items() if "__" in key}}
        pending = {key: value for key, value in options.items() if "__" not in key}
        async with AsyncLLM(str(directory), config=settings, **pending) as llm:
            result = await body(llm)
            core = llm._llm.engine.core
            for _ in range(1000):
                if not core.has_unfinished:
                    break
                await asyncio.sleep(0.002)
            assert not core.has_unfinished
            assert core.planner.cache.free_blocks == core.planner.cache.total_blocks
            assert core.planner.slots.num_free == core.planner.slots.slots
            return result

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture
def count(tmp_path: Path) -> Path:
    return write_toy(tmp_path / "count", "Count", max_len=256)


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, **more)


async def collect(llm: AsyncLLM, prompt: list[int], tokens: int, **more: Any) -> list[StreamDelta]:
    return [delta async for delta in llm.stream(prompt, params(tokens), **more)]


@pytest.mark.parametrize("ahead", [False, True])
def test_many_tasks_each_get_their_own_answer(count: Path, ahead: bool) -> None:
    async def body(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(llm.generate([i % 60], params(5 + i % 7)) for i in range(50)))
        for i, output in enumerate(outputs):
            assert output.outputs[0].token_ids == count_tokens([i % 60], 5 + i % 7, 64)
            assert output.outputs[0].finish_reason == "length"

    run(count, body, scheduling__async_scheduling=ahead)


def test_joined_deltas_are_the_output(count: Path) -> None:
    deltas = run(count, lambda llm: collect(llm, [3], 40))
    assert [t for delta in deltas for t in delta.token_ids] == count_tokens([3], 40, 64)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].finish_reason == "length"


def test_text_of_a_stream_is_the_text_of_the_whole(tmp_path: Path) -> None:
    directory = write_toy(tmp_path / "text", "Count", tokenizer=True)

    async def body(llm: AsyncLLM) -> None:
        whole = await llm.generate("a", params(20))
        parts = [delta.text async for delta in llm.stream("a", params(20))]
        assert "".join(parts) == whole.outputs[0].text == "bcdefghijklmnopqrstu"

    run(directory, body)


def test_slow_reader_loses_nothing_and_holds_up_nobody(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.stream([0], params(60))
        first = await anext(stream)
        others = await asyncio.gather(*(llm.generate([i], params(10)) for i in range(8)))
        assert all(o.outputs[0].finish_reason == "length" for o in others)
        rest = [delta async for delta in stream]
        assert [t for d in (first, *rest) for t in d.token_ids] == count_tokens([0], 60, 64)
        assert len(rest) < 59, "deltas that nobody fetched in time are joined"

    run(count, body)


def test_invalid_request_raises_and_leaves_others_alone(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        good = asyncio.create_task(llm.generate([1], params(30)))
        with pytest.raises(InvalidRequestError, match="prompt is empty"):
            await llm.generate([], params(3))
        with pytest.raises(InvalidRequestError, match=r"prompt_token_ids\[1\]=64"):
            await collect(llm, [1, 64], 3)
        assert (await good).outputs[0].token_ids == count_tokens([1], 30, 64)

    run(count, body)


def test_live_id_is_refused_and_free_again_afterwards(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = llm.stream([1], params(100), request_id="same")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="request_id='same'"):
            await llm.generate([2], params(2), request_id="same")
        tail = [delta async for delta in first]
        assert tail[-1].finish_reason == "length"
        again = await llm.generate([2], params(2), request_id="same")
        assert again.request_id == "same"

    run(count, body)


def test_abort_ends_the_request_it_names(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        victim = asyncio.create_task(collect(llm, [1], 200, request_id="victim"))
        bystander = asyncio.create_task(llm.generate([5], params(60)))
        await asyncio.sleep(0.01)
        await llm.abort("victim")
        await llm.abort("victim")
        await llm.abort("nobody")
        deltas = await victim
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["abort"]
        assert (await bystander).outputs[0].token_ids == count_tokens([5], 60, 64)

    run(count, body)


async def ended_early(llm: AsyncLLM) -> None:
    """Soon nothing runs, long before 200 tokens are out."""
    while llm._llm.engine.core.has_unfinished:
        await asyncio.sleep(0.002)
    assert llm._llm.engine.model.steps < 150  # type: ignore[attr-defined]


def slowly(llm: AsyncLLM) -> None:
    """At least 5 ms a step: 200 of them last a second."""
    llm._llm.engine.model.before = lambda batch: time.sleep(0.005)  # type: ignore[attr-defined]


def test_closing_a_stream_aborts_it(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        slowly(llm)
        stream = llm.stream([1], params(200))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await ended_early(llm)

    run(count, body)


def test_cancelled_task_ends_its_request(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        slowly(llm)
        task = asyncio.create_task(llm.generate([1], params(200)))
        while not llm._llm.engine.model.steps:  # type: ignore[attr-defined]
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended_early(llm)

    run(count, body)


def test_timeout_ends_one_request_with_its_code(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        model = llm._llm.engine.model
        loop = asyncio.get_running_loop()
        model.before = lambda batch: asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()  # type: ignore[attr-defined]
        late, fine = await asyncio.gather(llm.generate([1], params(200), timeout=0.05), llm.generate([2], params(4)))
        assert late.error is not None
        assert (late.error.code, late.outputs[0].finish_reason) == ("timeout", "error")
        assert fine.outputs[0].token_ids == count_tokens([2], 4, 64)

    run(count, body)


def test_back_pressure_bounds_what_is_inside(count: Path) -> None:
    async def body(llm: AsyncLLM) -> int:
        core, inside = llm._llm.engine.core, [0]
        add = core.add

        def counting(requests: Any) -> Any:
            result = add(requests)
            inside.append(len(core.requests))
            return result

        core.add = counting  # type: ignore[method-assign]
        outputs = await asyncio.gather(*(llm.generate([i % 60], params(6)) for i in range(40)))
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        return max(inside)

    assert 0 < run(count, body, max_pending=3) <= 3


def test_time_passes_while_waiting_for_room(count: Path) -> None:
    """Nothing of a request whose time passed outside ever runs, and it leaves no place behind."""

    async def body(llm: AsyncLLM) -> None:
        core, admitted = llm._llm.engine.core, []
        core.planner._enter = lambda s, hit, go=core.planner._enter: (admitted.append(s.request.request_id), go(s, hit))  # type: ignore[method-assign, misc, assignment]
        first = llm.stream([1], params(200), request_id="first")
        await anext(first)
        late = await llm.generate([2], params(4), request_id="late", timeout=0.02)
        assert late.error is not None
        assert (late.error.code, late.outputs[0].finish_reason, late.outputs[0].token_ids) == ("timeout", "error", [])
        deltas = await collect(llm, [2], 4, request_id="late", timeout=0.02)
        assert [(delta.finish_reason, delta.token_ids) for delta in deltas] == [("error", [])]
        assert llm._slots.locked()
        await first.aclose()  # type: ignore[attr-defined]
        assert (await llm.generate([2], params(4), timeout=60)).outputs[0].token_ids == count_tokens([2], 4, 64)
        assert not llm._slots.locked()
        assert admitted[:1] == ["first"]
        assert "late" not in admitted

    run(count, body, max_pending=1)


def test_aborted_while_waiting_for_room(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        core, admitted = llm._llm.engine.core, []
        core.planner._enter = lambda s, hit, go=core.planner._enter: (admitted.append(s.request.request_id), go(s, hit))  # type: ignore[method-assign, misc, assignment]
        first = llm.stream([1], params(200), request_id="first")
        await anext(first)
        whole = asyncio.create_task(llm.generate([2], params(4), request_id="whole"))
        parts = asyncio.create_task(collect(llm, [2], 4, request_id="parts", timeout=60))
        await asyncio.sleep(0.01)
        for _ in range(2):
            await llm.abort("whole")
            await llm.abort("parts")
        output = await asyncio.wait_for(whole, 5)
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids, output.error) == ("abort", [], None)
        assert [(delta.finish_reason, delta.token_ids) for delta in await parts] == [("abort", [])]
        await first.aclose()  # type: ignore[attr-defined]
        assert (await llm.generate([2], params(4), request_id="whole")).outputs[0].finish_reason == "length"
        assert admitted == ["first", "whole"]
        assert llm._slots._value == 1

    run(count, body, max_pending=1)


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02])
def test_cancelled_while_waiting_for_room(count: Path, delay: float) -> None:
    async def body(llm: AsyncLLM) -> None:
        first = llm.stream([1], params(200))
        await anext(first)
        waits = [asyncio.create_task(llm.generate([2], params(4), timeout=t)) for t in (None, delay + 0.001, 60)]
        await asyncio.sleep(delay)
        for task in waits:
            task.cancel()
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in (results[0], results[2]))
        await first.aclose()  # type: ignore[attr-defined]
        assert (await llm.generate([2], params(4))).outputs[0].finish_reason == "length"
        assert llm._slots._value == 1

    run(count, body, max_pending=1)


def test_a_reader_who_comes_at_the_end_gets_one_delta(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        stream = llm.stream([0], params(200))
        first = await anext(stream)
        while llm._llm.engine.core.has_unfinished:
            await asyncio.sleep(0.002)
        rest = [delta async for delta in stream]
        assert [t for d in (first, *rest) for t in d.token_ids] == count_tokens([0], 200, 64)
        assert (len(rest), rest[-1].finish_reason) == (1, "length")

    run(count, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("timeout", v) for v in (0, -1, "1", True, float("nan"), float("inf"), 10**400, [1])),
        *(("request_id", v) for v in ("", 5, b"x", ["x"])),
        *(("sampling_params", v) for v in ({"temperature": 0}, "x", 5, [SamplingParams()] * 2)),
    ],
)
def test_wrong_arguments_are_refused_by_name(count: Path, field: str, value: Any) -> None:
    arguments: dict[str, Any] = {field: value}

    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match=field):
            await llm.generate([1], **arguments)
        with pytest.raises(InvalidRequestError, match=field):
            await anext(llm.stream([1], **arguments))

    run(count, body)


def test_a_closed_engine_says_so_and_ends_whoever_waits(count: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(count), config=dict(SMALL), max_pending=1)
        first = llm.stream([1], params(200))
        await anext(first)
        outside = asyncio.create_task(llm.generate([2], params(4)))
        await asyncio.sleep(0.01)
        await llm.close()
        assert [delta.finish_reason async for delta in first][-1] == "abort"
        for late in (outside, llm.generate([2], params(4))):
            with pytest.raises(InvalidRequestError, match="closed: make a new one"):
                await late
        await llm.abort("anybody")
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_races_with_calls_and_answers_them_all(count: Path) -> None:
    """A call that comes too late fails; it never waits for a thread that has ended."""

    async def main() -> None:
        for _ in range(10):
            llm = AsyncLLM(str(count), config=dict(SMALL))
            calls = [asyncio.to_thread(llm._driver.call, lambda core: 1) for _ in range(16)]
            futures, *_ = await asyncio.gather(asyncio.gather(*calls), llm.close(), llm.close())
            for future in futures:
                with suppress(InvalidRequestError):
                    assert future.result(timeout=5) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_completions_of_one_stream_are_told_apart(tmp_path: Path) -> None:
    flat = write_toy(tmp_path / "flat", "Flat")

    async def body(llm: AsyncLLM) -> None:
        sampling = SamplingParams(n=3, seed=7, max_tokens=6)
        whole = await llm.generate([1, 2], sampling)
        by_child: dict[int, list[int]] = {}
        async for delta in llm.stream([1, 2], sampling):
            by_child.setdefault(delta.index, []).extend(delta.token_ids)
        assert by_child == {output.index: output.token_ids for output in whole.outputs}

    run(flat, body)


def test_loop_error_aborts_live_requests_and_goes_on(count: Path) -> None:
    async def body(llm: AsyncLLM) -> None:
        planner = llm._llm.engine.core.planner
        plan, calls = planner.plan, []

        def broken(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("planner bug")
            return plan(*args)

        planner.plan = broken  # type: ignore[method-assign]
        output = await llm.generate([1], params(50))
        assert output.outputs[0].finish_reason == "abort"
        assert (await llm.generate([2], params(4))).outputs[0].token_ids == count_tokens([2], 4, 64)

    run(count, body)


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_max_pending_is_checked(count: Path, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_pending"):
        AsyncLLM(str(count), config=dict(SMALL), max_pending=value)
