"""A16 (sgl-project/sglang#31598): characters cut by token borders come out once and whole."""

from __future__ import annotations

import pytest
from toys.checkpoints import ToyLLM

from deepinfer_core import SamplingParams

MERGED = (b"x ", "木".encode() + b"\xf0")
TOKENS = [257, 258, 0x9F, 0x8D, 0x8E, 0xC3, 0xA9]
DELTAS = ["x ", "木", "", "", "🍎", "", "é"]


@pytest.mark.parametrize("ahead", [False, True])
def test_deltas(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm("Script", tokenizer=MERGED, script=TOKENS, scheduling__async_scheduling=ahead)
    params = SamplingParams(temperature=0, max_tokens=7)
    deltas = list(llm.stream([0], params))
    assert [delta.text for delta in deltas if delta.token_ids] == DELTAS
    assert "".join(delta.text for delta in deltas) == "x 木🍎é" == llm.generate([[0]], params)[0].outputs[0].text


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cut", range(1, 8))
def test_cut_after_each_token(toy_llm: ToyLLM, ahead: bool, cut: int) -> None:
    """U+FFFD only in the last delta, only for a character that was cut."""
    llm = toy_llm("Script", tokenizer=MERGED, script=TOKENS, scheduling__async_scheduling=ahead)
    params = SamplingParams(temperature=0, max_tokens=cut)
    deltas = [delta.text for delta in llm.stream([0], params)]
    whole = b"".join([*MERGED, b"\x9f", b"\x8d", b"\x8e", b"\xc3", b"\xa9"][:cut]).decode(errors="replace")
    assert "".join(deltas) == whole == llm.generate([[0]], params)[0].outputs[0].text
    assert "\ufffd" not in "".join(deltas[:-1])
    assert whole.count("\ufffd") == (cut in (2, 3, 4, 6))


@pytest.mark.parametrize("ahead", [False, True])
def test_lone_continuation_bytes(toy_llm: ToyLLM, ahead: bool) -> None:
    llm = toy_llm(
        "Script",
        tokenizer=MERGED,
        script=[0x80],
        max_len=600,
        kv_cache__num_blocks=160,
        scheduling__async_scheduling=ahead,
    )
    params = SamplingParams(temperature=0, max_tokens=500)
    deltas = list(llm.stream([0], params))
    assert "".join(delta.text for delta in deltas) == "\ufffd" * 500
    assert max(len(delta.text) for delta in deltas) == 1
