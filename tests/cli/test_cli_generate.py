"""``deepinfer generate`` against a stand-in for the engine: prompts, sampling, output, failures."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeLLM, Run

from deepinfer_core.cli.sampling_options import NAMES
from deepinfer_core.engine.sampling_params import SamplingParams

MODEL = ("generate", "--model", "m")


def asked(fake: type[FakeLLM]) -> list[tuple[str, Any, Any]]:
    (llm,) = fake.instances
    assert llm.closed
    calls: list[tuple[str, Any, Any]] = llm.calls
    return calls


@pytest.fixture
def prompt_file(tmp_path: Path) -> Callable[..., str]:
    def write(*lines: str) -> str:
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(lines), encoding="utf-8")
        return str(file)

    return write


def test_one_prompt_gives_its_text_alone(run: Run, fake_llm: type[FakeLLM]) -> None:
    result = run(*MODEL, "--prompt", "hi")
    assert (result.code, result.out, result.err) == (0, "<hi>\n", "")


def test_standard_input_is_one_prompt_without_its_last_line_break(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, stdin="a\nb\n\n")
    assert asked(fake_llm)[0][1] == ["a\nb\n"]


def test_a_prompt_on_the_command_line_leaves_standard_input_alone(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, "--prompt", "hi", stdin="ignored")
    assert asked(fake_llm)[0][1] == ["hi"]


def test_an_empty_prompt_reaches_the_engine_which_judges_it(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, "--prompt", "")
    assert asked(fake_llm)[0][1] == [""]


def test_several_results_are_numbered(run: Run, fake_llm: type[FakeLLM]) -> None:
    assert run(*MODEL, "--prompt", "a", "--prompt", "b").out == "[0] <a>\n[1] <b>\n"


def test_several_completions_are_numbered(run: Run, fake_llm: type[FakeLLM]) -> None:
    assert run(*MODEL, "--prompt", "a", "-n", "2").out == "[0.0] <a>\n[0.1] <a>\n"


def test_chat_makes_a_users_message(run: Run, fake_llm: type[FakeLLM]) -> None:
    assert run(*MODEL, "--chat", "--prompt", "hi").out == "chat<hi>\n"
    assert asked(fake_llm)[0][1] == [[{"role": "user", "content": "hi"}]]


def test_prompt_file_mixes_kinds_and_keeps_order(
    run: Run, fake_llm: type[FakeLLM], prompt_file: Callable[..., str]
) -> None:
    file = prompt_file(
        '{"prompt": "a"}',
        "",
        '{"messages": [{"role": "user", "content": "b\u2028c"}]}',
        '{"prompt_token_ids": [1, 2], "temperature": 0, "max_tokens": 3}',
    )
    result = run(*MODEL, "--prompt-file", file, "--max-tokens", "9")
    assert result.out == "[0] <a>\n[1] chat<b\u2028c>\n[2] <[1, 2]>\n"
    (kind, prompts, params), (chat, _, chat_params) = asked(fake_llm)
    assert (kind, prompts, chat) == ("generate", ["a", [1, 2]], "chat")
    assert [p.max_tokens for p in (*params, *chat_params)] == [9, 3, 9]
    assert [p.temperature for p in params] == [1.0, 0.0]


def test_prompt_file_from_standard_input(run: Run, fake_llm: type[FakeLLM]) -> None:
    assert run(*MODEL, "--prompt-file", "-", stdin='{"prompt": "a"}\n').out == "<a>\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object with one of prompt, messages, prompt_token_ids"),
        ("{}", "expected an object with one of"),
        ('{"prompt": "a", "messages": []}', "expected an object with one of"),
        ('{"prompt": 3}', "prompt=3: expected a string"),
        ('{"messages": ["a"]}', "messages=['a']: expected a list of objects"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids=[1, True]: expected a list of integers"),
        ('{"prompt": "a", "temprature": 0}', "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ('{"prompt": "a", "temperature": NaN}', "temperature=nan"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
    ],
)
def test_bad_line_is_named(
    line: str, said: str, refused: Callable[..., str], fake_llm: type[FakeLLM], prompt_file: Callable[..., str]
) -> None:
    file = prompt_file('{"prompt": "good"}', line)
    text = refused(*MODEL, "--prompt-file", file)
    assert text.startswith(f"{file}:2: ")
    assert said in text
    assert fake_llm.instances == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "a", "--prompt-file", "f"), "not both"),
        ((), "no prompt"),
        (("--prompt-file", "/no/such"), "No such file"),
        (("--prompt", "a", "--temperature", "nan"), "temperature=nan"),
        (("--prompt", "a", "--top-p", "2"), "top_p=2.0"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens=0"),
        (("--prompt", "a", "--logit-bias", "x"), "expected TOKEN_ID=BIAS"),
        (("--prompt", "a", "--stream", "-n", "2"), "--stream shows one completion"),
        (("--prompt", "a", "--set", "kv_cache.block_size=0"), "kv_cache.block_size = 0"),
    ],
)
def test_mistakes_are_found_before_a_model_loads(
    arguments: tuple[str, ...], said: str, refused: Callable[..., str], fake_llm: type[FakeLLM]
) -> None:
    assert said in refused(*MODEL, *arguments)
    assert fake_llm.instances == []


def test_file_without_prompts(refused: Callable[..., str], prompt_file: Callable[..., str]) -> None:
    assert "holds no prompt" in refused(*MODEL, "--prompt-file", prompt_file("", ""))


def test_token_ids_are_no_chat(refused: Callable[..., str], prompt_file: Callable[..., str]) -> None:
    file = prompt_file('{"prompt_token_ids": [1]}')
    assert "cannot be a chat message" in refused(*MODEL, "--chat", "--prompt-file", file)


def test_no_model_says_how_to_give_one(refused: Callable[..., str]) -> None:
    assert "--model demo" in refused("generate", "--prompt", "a")


def test_model_may_come_from_the_environment(
    run: Run, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_MODEL__PATH", "elsewhere")
    run("generate", "--prompt", "a")
    assert fake_llm.instances[0].model == "elsewhere"


def test_options_reach_the_configuration_with_their_source(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, "--prompt", "a", "--dtype", "float16", "--accelerator", "cpu", "--set", "model.dtype=float32",
        "--set", "plugins.block=one", "--no-plugin", "two", "--log-level", "error")  # fmt: skip
    config = fake_llm.instances[0].config
    assert (config.model.path, config.model.dtype, config.accelerator) == ("m", "float16", "cpu")
    assert (config.plugins.block, config.logging.level) == (("one", "two"), "error")
    assert (config.sources["model.dtype"], config.sources["plugins.block"]) == ("--dtype", "--no-plugin")


def test_every_sampling_option_reaches_the_request(run: Run, fake_llm: type[FakeLLM]) -> None:
    flags = {
        "max_tokens": ("--max-tokens 50", 50),
        "min_tokens": ("--min-tokens 2", 2),
        "temperature": ("--temperature 0", 0.0),
        "top_p": ("--top-p 0.5", 0.5),
        "top_k": ("--top-k 7", 7),
        "min_p": ("--min-p 0.1", 0.1),
        "seed": ("--seed 0", 0),
        "n": ("--n 2", 2),
        "stop": ("--stop a --stop b", ("a", "b")),
        "stop_token_ids": ("--stop-token-id 3 --stop-token-id 4", (3, 4)),
        "include_stop_str_in_output": ("--include-stop", True),
        "ignore_eos": ("--ignore-eos", True),
        "presence_penalty": ("--presence-penalty 1", 1.0),
        "frequency_penalty": ("--frequency-penalty -1", -1.0),
        "repetition_penalty": ("--repetition-penalty 1.5", 1.5),
        "logit_bias": ("--logit-bias 3=-1.5 --logit-bias 4=2", ((3, -1.5), (4, 2.0))),
        "bad_words": ("--bad-word x", ("x",)),
        "logprobs": ("--logprobs 0", 0),
        "prompt_logprobs": ("--prompt-logprobs 1", 1),
    }
    run(*MODEL, "--prompt", "a", *[word for flag, _ in flags.values() for word in flag.split()])
    ((_, _, (params,)),) = asked(fake_llm)
    assert {name: getattr(params, name) for name in flags} == {name: value for name, (_, value) in flags.items()}


def test_limit_of_tokens_when_none_is_given(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, "--prompt", "a")
    assert asked(fake_llm)[0][2][0].max_tokens == 256


def test_json_is_one_strict_object_per_result(run: Run, fake_llm: type[FakeLLM]) -> None:
    def no_constants(name: str) -> None:
        raise AssertionError(name)

    out = run(*MODEL, "--json", "--prompt", "a\nb", "--prompt", "c").out
    first, second = (json.loads(line, parse_constant=no_constants) for line in out.splitlines())
    assert first["outputs"][0]["text"] == "<a\nb>"
    assert first["outputs"][0]["logprobs"] == [{"7": {"logprob": None, "rank": 1, "decoded_token": "x"}}]
    assert second["prompt"] == "<c>"


def test_failed_request_is_a_line_and_exit_code_1(run: Run, fake_llm: type[FakeLLM]) -> None:
    result = run(*MODEL, "--prompt", "a", "--prompt", "fail")
    assert result.code == 1
    assert result.out.splitlines()[0] == "[0] <a>"
    assert result.err == "error: prompt 1: nan_logits: the model gave; NaN\n"


def test_stream_writes_deltas(run: Run, fake_llm: type[FakeLLM]) -> None:
    assert run(*MODEL, "--stream", "--prompt", "a").out == "one two\n"


def test_stream_of_a_chat_takes_the_rendered_prompt(run: Run, fake_llm: type[FakeLLM]) -> None:
    run(*MODEL, "--stream", "--chat", "--prompt", "hi")
    assert [(name, prompt) for name, prompt, _ in asked(fake_llm)] == [
        ("chat_prompt", [{"role": "user", "content": "hi"}]),
        ("stream", [5, 6]),
    ]


def test_stream_as_json_is_one_object_per_delta(run: Run, fake_llm: type[FakeLLM]) -> None:
    out = run(*MODEL, "--stream", "--json", "--prompt", "a", "--prompt", "b").out
    deltas = [json.loads(line) for line in out.splitlines()]
    assert [(d["prompt_index"], d["text"], d["finish_reason"]) for d in deltas] == [
        (0, "one", None),
        (0, " two", "length"),
        (1, "one", None),
        (1, " two", "length"),
    ]


def test_stream_that_fails_is_a_line_and_exit_code_1(run: Run, fake_llm: type[FakeLLM]) -> None:
    result = run(*MODEL, "--stream", "--prompt", "fail")
    assert (result.code, result.err) == (1, "error: prompt 0: internal: it broke\n")


def test_interrupt_closes_the_engine(run: Run, fake_llm: type[FakeLLM]) -> None:
    result = run(*MODEL, "--stream", "--prompt", "interrupt")
    assert result.code == 130
    assert asked(fake_llm)[0][0] == "stream"


# ---- the form of the text


def test_a_form_reaches_the_sampling_parameters(run: Run, fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.ebnf"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    grammar.write_text('root ::= "é"', encoding="utf-8")
    forms = [("--json-schema", str(schema)), ("--regex", "a+"), ("--grammar", str(grammar))]
    expected = [("json", '{"type": "integer"}'), ("regex", "a+"), ("ebnf", 'root ::= "é"')]
    for form, (kind, text) in zip(forms, expected, strict=True):
        fake_llm.instances.clear()
        assert run(*MODEL, "--prompt", "hi", *form).code == 0
        spec = asked(fake_llm)[0][2][0].structured_outputs
        assert (spec.kind, spec.text) == (kind, text)


def test_a_form_that_cannot_be_read_is_named(run: Run, fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    missing = run(*MODEL, "--prompt", "hi", "--json-schema", str(tmp_path / "no.json"))
    assert missing.code == 2
    assert "no.json" in missing.err
    broken = tmp_path / "broken.json"
    broken.write_text('{"type": "object", "properties": {"a": }}', encoding="utf-8")
    result = run(*MODEL, "--prompt", "hi", "--json-schema", str(broken))
    assert result.code == 2
    assert 'properties": {"a": }}\'' in result.err
    both = run(*MODEL, "--prompt", "hi", "--regex", "a", "--grammar", str(broken))
    assert both.code == 2
    assert "--regex and --grammar are different forms" in both.err


def test_every_parameter_has_an_option() -> None:
    """But for aliases and what plugins add."""
    reached = {*NAMES, "skip_special_tokens", "structured_outputs"}
    assert set(inspect.signature(SamplingParams).parameters) - reached == {"seq_seed", "so_args", "extra_args"}


def test_the_rarer_parameters_reach_the_engine(run: Run, fake_llm: type[FakeLLM]) -> None:
    options = ("--allowed-token-id", "3", "--allowed-token-id", "5", "--show-special-tokens")
    run(*MODEL, "--prompt", "hi", *options, "--logprobs", "1", "--logprobs-mode", "processed")
    (params,) = asked(fake_llm)[0][2]
    assert (params.allowed_token_ids, params.skip_special_tokens) == ((3, 5), False)
    assert (params.logprobs, params.logprobs_mode) == (1, "processed")


WRONG = ["nan", "inf", "-inf", "-1e9", "x", "", "1e400", "99999999999999999999999", "True", "[1]"]
NUMBERS = [
    *("--max-tokens", "--min-tokens", "--temperature", "--top-p", "--top-k", "--min-p", "-n", "--stop-token-id"),
    *("--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--allowed-token-id"),
    *("--logprobs", "--prompt-logprobs", "--logit-bias"),
]


NUMBERS_AFTER_ALL = {("--temperature", WRONG[7]), ("--logit-bias", WRONG[7]), ("--logit-bias", "-1e9")}


@pytest.mark.parametrize("option", NUMBERS)
def test_no_number_that_is_none_is_taken(refused: Callable[..., str], fake_llm: type[FakeLLM], option: str) -> None:
    """Each is one line that names the option or the parameter; no engine is opened."""
    names = (option, option.strip("-").replace("-", "_").replace("_token_id", "_token_ids"))
    for value in WRONG:
        if (option, value) in NUMBERS_AFTER_ALL:
            continue
        given = f"3={value}" if option == "--logit-bias" else value
        message = refused(*MODEL, "--prompt", "hi", option, given)
        assert any(name in message for name in names), message
    assert fake_llm.instances == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", '"1"', "true", "null", "[1]", "{}"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k", "n", "min_tokens"])
def test_no_number_in_a_file_that_is_none_is_taken(
    refused: Callable[..., str], fake_llm: type[FakeLLM], prompt_file: Callable[..., str], name: str, value: str
) -> None:
    file = prompt_file('{"prompt": "a"}', f'{{"prompt": "b", "{name}": {value}}}')
    message = refused(*MODEL, "--prompt-file", file)
    assert "line 2" in message or ":2" in message
    assert fake_llm.instances == []
