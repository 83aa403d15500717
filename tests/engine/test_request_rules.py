"""The written rules for requests: prompts, lengths, counts. One test a rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from toys.checkpoints import EOS, EOS_ID, byte_tokenizer, open_toy, write_toy
from toys.checks import assert_clean, ends_of, ids_of
from toys.oracle import count_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3)
TIMES = ("deadline", "ttft_target", "tpot_target", "timeout")


def refused(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    """The one line with which a request is refused; the engine stays clean."""
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, params)
    assert_clean(llm)
    return str(caught.value)


# ---- prompt


def test_prompt_as_text(toy_llm: Any) -> None:
    (output,) = toy_llm("Count", tokenizer=True).generate("ax", GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("ax", [97, 120])
    assert output.outputs[0].text == "yz{"


def test_prompt_as_one_list_of_ids(toy_llm: Any) -> None:
    (output,) = toy_llm("Count").generate([4, 9], GREEDY)
    assert (output.prompt, output.prompt_token_ids) == (None, [4, 9])


@pytest.mark.parametrize("prompt", [{"prompt": "ax"}, {"prompt_token_ids": [97, 120]}])
def test_prompt_as_mapping(toy_llm: Any, prompt: dict[str, Any]) -> None:
    (output,) = toy_llm("Count", tokenizer=True).generate(prompt, GREEDY)
    assert output.prompt == prompt.get("prompt")
    assert output.prompt_token_ids == [97, 120]


def test_lists_of_prompts_are_batches(toy_llm: Any) -> None:
    outputs = toy_llm("Count", tokenizer=True).generate(["a", [98], {"prompt": "c"}, (100,)], GREEDY)
    assert ids_of(outputs) == [count_tokens([first], 3, 320) for first in (97, 98, 99, 100)]


def test_numpy_ids_are_ids(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    assert ids_of(llm.generate(np.array([4, 9]), GREEDY)) == [[10, 11, 12]]
    assert ids_of(llm.generate([np.array([4]), [np.int32(9)]], GREEDY)) == [[5, 6, 7], [10, 11, 12]]


def test_no_prompts_give_no_results(toy_llm: Any) -> None:
    assert toy_llm("Count").generate([], GREEDY) == []


@pytest.mark.parametrize("prompt", ["", [[]], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompt_is_an_error(toy_llm: Any, prompt: Any) -> None:
    assert "empty" in refused(toy_llm("Count", tokenizer=True), prompt)


def test_empty_text_is_legal_when_the_tokenizer_adds_bos(tmp_path: Any) -> None:
    directory = write_toy(tmp_path / "bos", "Count", tokenizer=True)
    backend = byte_tokenizer()
    backend.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, EOS_ID)])
    backend.save(str(directory / "tokenizer.json"))
    with open_toy(directory) as llm:
        assert llm.generate("", GREEDY)[0].prompt_token_ids == [EOS_ID]


@pytest.mark.parametrize("bad", [[-1], [64], [3, 2**40]])
def test_ids_outside_the_vocabulary_are_an_error(toy_llm: Any, bad: list[int]) -> None:
    assert f"]={bad[-1]}: expected an id in [0, 64)" in refused(toy_llm("Count"), [bad])


def test_padding_ids_are_outside_the_vocabulary(toy_llm: Any) -> None:
    assert "[0, 261)" in refused(toy_llm("Count", tokenizer=True), [300])


@pytest.mark.parametrize(
    "prompt",
    [
        *(7, None, [True], [1.5], [["a"]], {"prompt": 5}, {}, {"prompt": "a", "prompt_token_ids": [1]}, {"text": "a"}),
        *(
            b"ab",
            [b"ab"],
            {"prompt_token_ids": b"ab"},
            {1, 2},
            "\ud800",
            {"prompt": "a\udfff"},
            np.array([1.0]),
            iter([1]),
        ),
    ],
)
def test_anything_else_is_an_error_that_names_it(toy_llm: Any, prompt: Any) -> None:
    assert "prompt" in refused(toy_llm("Count", tokenizer=True), prompt)


def test_text_without_a_tokenizer_is_an_error(toy_llm: Any) -> None:
    assert "token ids" in refused(toy_llm("Count"), "hello")


def test_one_bad_prompt_starts_nothing(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    assert "request 1" in refused(llm, [[3], [99], [4]])
    assert ids_of(llm.generate([3], GREEDY)) == [[4, 5, 6]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("priority", v) for v in (1.5, "1", True, 2**63, -(2**70), math.nan)),
        *((name, v) for name in ("tenant", "cache_salt") for v in (3, b"a", "\ud800", ["a"])),
        *((f"{name}_ms", v) for name in TIMES for v in (0, -1, "1", True, math.nan, math.inf, 10**400, [1])),
        ("nope", 1),
    ],
)
def test_request_fields_are_checked(toy_llm: Any, field: str, value: Any) -> None:
    assert field in refused(toy_llm("Count"), {"prompt_token_ids": [1], field: value})


def test_an_unknown_field_is_told_all_there_are(toy_llm: Any) -> None:
    assert "prompt field 'promt': expected one of prompt, prompt_token_ids, priority, tenant, " in refused(
        toy_llm("Count"), {"promt": "a"}
    )


def test_request_fields_at_their_limits(toy_llm: Any) -> None:
    fields: dict[str, Any] = {f"{name}_ms": 1e300 for name in TIMES} | {"priority": -(2**63) + 1, "tenant": "é"}
    assert ids_of(toy_llm("Count").generate({"prompt_token_ids": [3], **fields}, GREEDY)) == [[4, 5, 6]]


@pytest.mark.parametrize("messages", [5, None, "hello", [5], [["x"]], [{"role": "user"}, 3], {"role": "user"}])
def test_messages_of_another_kind_are_an_error(toy_llm: Any, messages: Any) -> None:
    llm = toy_llm("Count", tokenizer=True)
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(messages, GREEDY, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert_clean(llm)


# ---- length


def test_prompt_one_short_of_the_limit_gives_one_token(toy_llm: Any) -> None:
    outputs = toy_llm("Count", max_len=32).generate([3] * 31, SamplingParams(temperature=0, max_tokens=9))
    assert (ids_of(outputs), ends_of(outputs)) == ([[4]], ["length"])


@pytest.mark.parametrize("length", [32, 33])
def test_prompt_at_or_over_the_limit_is_an_error(toy_llm: Any, length: int) -> None:
    text = refused(toy_llm("Count", max_len=32), [3] * length)
    assert f"prompt has {length} tokens: expected fewer than max_model_len=32: shorten it, or raise" in text


def test_a_text_that_no_number_of_tokens_could_hold_is_not_read(toy_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take minutes, and gigabytes, to count its tokens."""
    llm = toy_llm("Count", max_len=32, tokenizer=True)
    longest = llm.tokenizer.longest_token
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: pytest.fail("read"))
    said = f"prompt has {32 * longest + 1} characters: expected at most {32 * longest}"
    assert said in refused(llm, "a" * (32 * longest + 1))
    with pytest.raises(InvalidRequestError, match=said):
        llm.chat(
            [{"role": "user", "content": "a" * (32 * longest + 1)}],
            chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        )


def test_output_over_the_limit_is_clipped(toy_llm: Any) -> None:
    outputs = toy_llm("Count", max_len=32).generate([3] * 28, SamplingParams(temperature=0, max_tokens=100))
    assert (ids_of(outputs), ends_of(outputs)) == ([[4, 5, 6, 7]], ["length"])


def test_max_tokens_none_fills_the_context(toy_llm: Any) -> None:
    outputs = toy_llm("Count", max_len=32).generate([3] * 2, SamplingParams(temperature=0, max_tokens=None))
    assert ids_of(outputs) == [count_tokens([3], 30, 64)]


def test_max_model_len_setting_is_the_limit(toy_llm: Any) -> None:
    assert "16" in refused(toy_llm("Count", model__max_model_len=16), [3] * 16)


def test_prompt_larger_than_the_pool_is_an_error_at_once(toy_llm: Any) -> None:
    assert "kv_cache.num_blocks" in refused(toy_llm("Count", kv_cache__num_blocks=7), [3] * 25)


def test_output_larger_than_the_pool_is_clipped(toy_llm: Any) -> None:
    llm = toy_llm("Count", kv_cache__num_blocks=7)
    outputs = llm.generate([3] * 20, SamplingParams(temperature=0, max_tokens=100))
    assert ends_of(outputs) == ["length"]
    assert ids_of(outputs) == [count_tokens([3], 4, 64)]
    assert_clean(llm)


def test_prompt_larger_than_a_window_pool_still_runs(toy_llm: Any) -> None:
    llm = toy_llm("PrefixHash", groups={"near": 6}, kv_cache__num_blocks=6)
    (output,) = llm.generate([5] * 60, GREEDY)
    assert output.outputs[0].finish_reason == "length"
    assert_clean(llm)


@pytest.mark.parametrize("setting", ["kv_cache__num_blocks", "kv_cache__block_size"])
def test_a_cache_larger_than_all_addresses_is_an_error(toy_llm: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"blocks take .* lower kv_cache\.num_blocks"):
        toy_llm("Count", **{setting: 10**24})


def test_a_cache_larger_than_memory_is_an_error(toy_llm: Any) -> None:
    """Tokens of one byte: 2^60 bytes."""
    with pytest.raises(ConfigError, match=r"kv_cache: 1125899906842624 blocks take .*lower kv_cache.num_blocks"):
        toy_llm("Count", kv_cache__num_blocks=2**50)


def test_window_pool_too_small_for_one_row_is_an_error(toy_llm: Any) -> None:
    with pytest.raises(ConfigError, match="num_blocks=8: a window of 30 tokens needs at least 10"):
        toy_llm("PrefixHash", groups={"near": 30}, kv_cache__num_blocks=8)
    llm = toy_llm("PrefixHash", groups={"near": 30}, kv_cache__num_blocks=10, kv_cache__prefix_cache=False)
    (output,) = llm.generate([5] * 60, SamplingParams(temperature=0, max_tokens=60))
    assert len(output.outputs[0].token_ids) == 60
    assert_clean(llm)


def test_unchunked_prompt_over_the_budget_is_an_error(toy_llm: Any) -> None:
    llm = toy_llm("Count", scheduling__chunked_prefill=False, scheduling__max_batch_tokens=8)
    assert "chunked_prefill" in refused(llm, [3] * 9)
    assert ids_of(llm.generate([3] * 8, GREEDY)) == [[4, 5, 6]]


# ---- n


def test_n_over_max_running_is_an_error(toy_llm: Any) -> None:
    llm = toy_llm("Count", scheduling__max_running=3)
    assert "n=4" in refused(llm, [3], SamplingParams(n=4))
    assert len(llm.generate([3], SamplingParams(n=3, seed=1))[0].outputs) == 3


@pytest.mark.parametrize("n", [10**9, 2**63 - 1])
def test_huge_n_is_refused_without_work(toy_llm: Any, n: int) -> None:
    llm = toy_llm("Count")
    assert f"n={n}" in refused(llm, [3], SamplingParams(n=n))
    assert llm.engine.model.steps == 0


# ---- ids against the vocabulary


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[64]),
        SamplingParams(allowed_token_ids=[1, 64]),
        SamplingParams(logit_bias={64: 1.0}),
    ],
)
def test_parameter_ids_outside_the_vocabulary_are_an_error(toy_llm: Any, params: SamplingParams) -> None:
    assert "64" in refused(toy_llm("Count"), [3], params)


@pytest.mark.parametrize("params", [SamplingParams(stop="a"), SamplingParams(bad_words=["a"])])
def test_text_parameters_need_a_tokenizer(toy_llm: Any, params: SamplingParams) -> None:
    assert "tokenizer" in refused(toy_llm("Count"), [3], params)


@pytest.mark.parametrize("words", [["a" * 65], ["a", "b" * 64], [f"w{i}" for i in range(513)]])
def test_bad_words_that_would_widen_everybodys_table_are_an_error(toy_llm: Any, words: list[str]) -> None:
    """64 tokens are as many as there may be, the space before a word included."""
    llm = toy_llm("Count", tokenizer=True)
    assert "bad_words" in refused(llm, [3], SamplingParams(bad_words=words))
    params = SamplingParams(temperature=0, max_tokens=2, bad_words=["a" * 63, *(f"w{i}" for i in range(511))])
    assert ids_of(llm.generate([3], params)) == [[4, 5]]


def test_many_stop_ids_cost_nobody_else(toy_llm: Any) -> None:
    """The columns that are compared in every step are those of requests that run."""
    llm = toy_llm("Count")
    slots, widths = llm.engine.core.planner.slots, []
    llm.engine.model.before = lambda batch: widths.append(slots.stop_width)
    many = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[*range(20, 60)])
    for params in ([GREEDY] * 2, [many, GREEDY], [GREEDY] * 2, [many, SamplingParams(temperature=0, max_tokens=6)]):
        llm.generate([[3], [4]], params)
    assert widths == [0] * 3 + [40] * 3 + [0] * 3 + [40] * 3 + [0] * 3
    assert ids_of(llm.generate([[15], [3]], many)) == [[16, 17, 18], [4, 5, 6]]
    assert ids_of(llm.generate([[18], [3]], many)) == [[19, 20], [4, 5, 6]]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_whole_vocabulary_logprobs_are_refused_when_they_cannot_fit(toy_llm: Any, field: str) -> None:
    llm = toy_llm("Count", vocab_size=1_000_000, max_len=4096)
    params: dict[str, Any] = {field: -1, "max_tokens": 100}
    assert field in refused(llm, [3] * 100, SamplingParams(**params))


# ---- greedy, seeds, padding


def test_greedy_takes_the_lowest_id_of_equals(toy_llm: Any) -> None:
    assert ids_of(toy_llm("Flat").generate([3], GREEDY)) == [[0, 0, 0]]


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (5, 2**64 + 5), (-(2**70), 0)])
def test_seed_is_taken_modulo_2_to_the_64(toy_llm: Any, seed: int, same: int) -> None:
    llm = toy_llm("Flat")
    outputs = [llm.generate([3], SamplingParams(seed=s, max_tokens=8)) for s in (seed, same, seed + 1)]
    assert ids_of(outputs[0]) == ids_of(outputs[1]) != ids_of(outputs[2])


def test_padding_ids_are_never_sampled(toy_llm: Any) -> None:
    llm = toy_llm("Const", tokenizer=True, logits={"300": 50.0, "319": 60.0, "261": 40.0, "260": 5.0, "70": 5.0})
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)]
    params += [SamplingParams(seed=s, max_tokens=20, ignore_eos=True) for s in range(10)]
    outputs = llm.generate([[3]] * 11, params)
    assert ids_of(outputs)[0] == [70] * 4
    assert max(max(ids) for ids in ids_of(outputs)) <= 260


# ---- request ids


def test_live_duplicate_is_an_error_and_the_first_is_unharmed(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    core, intake = llm.engine.core, llm.engine.intake
    first, other, again = (
        intake.request(name, [3], GREEDY, now=0.0, stream=False) for name in ("same", "other", "same")
    )
    core.add([first])
    core.step()
    with pytest.raises(InvalidRequestError, match="same"):
        core.add([other, again])
    assert set(core.requests) == {"same"}
    while core.has_unfinished:
        core.step()
    assert llm.output(first).outputs[0].token_ids == [4, 5, 6]
    core.add([again])
    core.abort(["same"])
    assert_clean(llm)


def test_twice_in_one_call_is_an_error(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    two = [llm.engine.intake.request("same", [3], GREEDY, now=0.0, stream=False) for _ in range(2)]
    with pytest.raises(InvalidRequestError, match="same"):
        llm.engine.core.add(two)
    assert_clean(llm)


def test_abort_of_unknown_and_finished_ids_is_nothing(toy_llm: Any) -> None:
    llm = toy_llm("Count")
    (output,) = llm.generate([3], GREEDY)
    assert llm.engine.core.abort([output.request_id, "never heard of"]).finished == []
    assert output.outputs[0].finish_reason == "length"
