"""Conversations, whole or several, sync or not: rendered, answered like the prompt they are, and shown as it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import SMALL, ToyLLM, write_toy

from deepinfer_core import AsyncLLM, SamplingParams
from deepinfer_core.api import InvalidRequestError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | join(',') }}]{% endif %}{% if add_generation_prompt %}<answer>{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
LONGER = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "abc"}]
GREEDY = SamplingParams(temperature=0, max_tokens=3)


def test_one_conversation(toy_llm: ToyLLM) -> None:
    """COUNT answers "<answer>" with what follows ">"."""
    (output,) = toy_llm("Count", tokenizer=True).chat(LONGER, GREEDY, chat_template=TEMPLATE)
    assert output.prompt == "<user>hello<assistant>hi<user>abc<answer>"
    assert bytes(output.prompt_token_ids).decode() == output.prompt
    assert output.outputs[0].text == "?@A"


def test_several_conversations_keep_their_order_and_parameters(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", tokenizer=True)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (4, 1, 2)]
    outputs = llm.chat([HELLO, LONGER, HELLO], params, chat_template=TEMPLATE, add_generation_prompt=False)
    assert [output.outputs[0].text for output in outputs] == ["pqrs", "d", "pq"]


def test_variables_reach_the_template(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", tokenizer=True)
    (output,) = llm.chat(HELLO, GREEDY, chat_template=TEMPLATE, tools=["a", "b"])
    assert output.prompt == "<user>hello[a,b]<answer>"


def test_no_conversations_give_no_results(toy_llm: ToyLLM) -> None:
    assert toy_llm("Count", tokenizer=True).chat([], GREEDY) == []


def test_text_is_no_conversation(toy_llm: ToyLLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages='hello': expected a list of messages"):
        toy_llm("Count", tokenizer=True).chat("hello", GREEDY)


def test_a_model_without_a_tokenizer_says_so(toy_llm: ToyLLM) -> None:
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        toy_llm("Count").chat(HELLO, GREEDY)


def test_an_async_engine_chats_and_explains_alike(toy_llm: ToyLLM, tmp_path: Path) -> None:
    plain = toy_llm("Count", tokenizer=True)
    (expected,) = plain.chat(LONGER, GREEDY, chat_template=TEMPLATE)
    directory = write_toy(tmp_path / "async", "Count", tokenizer=True, max_len=256)

    async def main() -> None:
        async with AsyncLLM(str(directory), config={**SMALL, "scheduling.max_running": 1}) as llm:
            output = await llm.chat(LONGER, GREEDY, chat_template=TEMPLATE)
            assert (output.prompt, output.outputs) == (expected.prompt, expected.outputs)
            assert llm.get_tokenizer().decode([97]) == "a"
            assert llm.explain()["facts"] == plain.explain()["facts"]
            llm._llm.engine.model.before = lambda batch: time.sleep(0.005)  # type: ignore[attr-defined]
            first = llm.stream([1], SamplingParams(temperature=0, max_tokens=200), request_id="first")
            await anext(first)
            waiting = asyncio.create_task(llm.generate([2], GREEDY, request_id="second"))
            reason: Any = None
            while reason is None or "queued" in reason:
                await asyncio.sleep(0.002)
                reason = llm.why_waiting("second")
            assert reason.startswith("waits for a free slot (0 before it;")
            assert llm.why_waiting("first") is None
            assert llm.why_waiting("nobody") is None
            await first.aclose()  # type: ignore[attr-defined]
            assert (await waiting).outputs[0].token_ids == [3, 4, 5]

    asyncio.run(asyncio.wait_for(main(), 60))
