"""Chat templates, against transformers on the same directory."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizer_support import CONFIG, byte_fallback, load, save_tokenizer, wrapped
from transformers import AutoTokenizer

from deepinfer_core.api import CheckpointError, InvalidRequestError

TALK: list[dict[str, str]] = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": "Grüße 木 'quoted' \"too\""},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "1 < 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"z": 1, "a": ["é", None, True]}}}]

TEMPLATES = {
    "roles": """{% for message in messages %}
    {%- if message.role == 'system' %}
[SYS] {{ message.content | trim }} [/SYS]
    {% else %}
{{ bos_token }}{{ message['role'] }}: {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{%- endif %}""",
    "tojson": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": """{%- set ns = namespace(last='', n=0) -%}
{%- for m in messages -%}{%- set ns.last = m.content -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}
{{ ns.n }} {{ ns.last }}""",
    "macro": """{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}
{% for m in messages %}{{ turn(m) }}{% endfor %}""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "absent variables": "{{ nothing }}{% if tools is not none %}tools{% endif %}{% if documents %}docs{% endif %}.",
    "slices": "{{ messages[0].content[:5] }}{{ messages[1:][0]['content'].split(' ')[-1] }}{{ messages | length }}",
    "extra": "{{ style }} {{ 'on' if thinking is defined and thinking else 'off' }}",
    "whitespace": "  {% if true %}\n   x\n  {% endif %}\n\ty  {{- ' z ' -}}  \n",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_rendering_equals_transformers(tmp_path: Path, name: str, prompted: bool) -> None:
    save_tokenizer(tmp_path, byte_fallback(), {**CONFIG, "chat_template": TEMPLATES[name]})
    variables: dict[str, Any] = {"style": "brief", "thinking": True} if name == "extra" else {}
    if name == "tojson":
        variables["tools"] = TOOLS
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=prompted, **variables
    )
    ours = load(tmp_path).apply_chat_template(TALK, add_generation_prompt=prompted, **variables)
    assert ours == theirs


def test_none_fields_are_left_out_as_in_transformers(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is defined else '-' }}{% endfor %}"
    save_tokenizer(tmp_path, byte_fallback(), {**CONFIG, "chat_template": template})
    talk: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(talk, tokenize=False)
    assert load(tmp_path).apply_chat_template(talk) == theirs == "a-"


def test_generation_prompt_is_on_by_default() -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": "{{ add_generation_prompt }}"})
    assert tokenizer.apply_chat_template([]) == "True"


def test_strftime_now() -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": "{{ strftime_now('%Y') }}"})
    before = datetime.now().year
    assert before <= int(tokenizer.apply_chat_template([])) <= datetime.now().year


def test_raise_exception_reaches_the_user() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": source})
    assert tokenizer.apply_chat_template([{"role": "user"}]) == "ok"
    with pytest.raises(InvalidRequestError, match="messages: the chat template refused them: roles must alternate"):
        tokenizer.apply_chat_template([{"role": "system"}])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "chat_template=3: expected Jinja source, or a template's name"),
        ("{{ nope(", "chat_template='{{ nope(': chat template, line 1: "),
    ],
)
def test_a_template_that_is_given_and_is_none_is_a_refused_request(given: Any, said: str) -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": "ok"})
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.apply_chat_template([], chat_template=given)
    assert str(caught.value).startswith(said)


def test_a_message_that_lacks_what_the_template_reads_is_named() -> None:
    tokenizer = wrapped(
        byte_fallback(), chat_templates={"default": "{% for m in messages %}{{ m.content + 'x' }}{% endfor %}"}
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": None}]
    with pytest.raises(InvalidRequestError, match=r"; messages\[1\]={'role': 'user'} has no 'content'$"):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ missing.field }}", "{{ 1 // 0 }}"])
def test_failing_template_is_a_refused_request(source: str) -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": source})
    with pytest.raises(InvalidRequestError, match="the chat template refused them"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(role='system') }}"]
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": source})
    with pytest.raises(InvalidRequestError, match="refused"):
        tokenizer.apply_chat_template([{"role": "user"}])


def test_the_callers_messages_stay_as_they_are() -> None:
    talk = [{"role": "user", "content": "x", "tool_calls": None}]
    wrapped(byte_fallback(), chat_templates={"default": "{{ messages }}"}).apply_chat_template(talk)
    assert talk == [{"role": "user", "content": "x", "tool_calls": None}]


def test_template_that_is_not_jinja() -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"default": "a\n{% for %}"})
    with pytest.raises(CheckpointError, match="chat template, line 2"):
        tokenizer.apply_chat_template([])


def test_no_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback(), CONFIG)
    tokenizer = load(tmp_path)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(TALK)
    assert tokenizer.apply_chat_template(TALK, chat_template="{{ messages | length }}") == "4"


NAMED = [
    {"name": "default", "template": "plain {{ messages | length }}"},
    {"name": "tool_use", "template": "tools {{ tools | length }}"},
    {"name": "rag", "template": "rag"},
]


def test_named_templates(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback(), {**CONFIG, "chat_template": NAMED})
    ours = load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template == NAMED[0]["template"]
    options: dict[str, Any]
    for options in ({}, {"tools": TOOLS}, {"chat_template": "rag"}, {"chat_template": "own {{ bos_token }}"}):
        expected = theirs.apply_chat_template(TALK, tokenize=False, **options)
        assert ours.apply_chat_template(TALK, **options) == expected


def test_named_templates_without_a_default() -> None:
    tokenizer = wrapped(byte_fallback(), chat_templates={"rag": "r", "other": "o"})
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match=r"name one of \['other', 'rag'\]"):
        tokenizer.apply_chat_template(TALK)
    assert tokenizer.apply_chat_template(TALK, chat_template="other") == "o"


def test_malformed_named_templates(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback(), {**CONFIG, "chat_template": [{"name": "default"}]})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: each entry of 'chat_template'"):
        load(tmp_path)


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_fallback(), {**CONFIG, "chat_template": "from config"})
    (tmp_path / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag file", encoding="utf-8")
    ours = load(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.apply_chat_template(TALK) == theirs.apply_chat_template(TALK, tokenize=False) == "from file é"
    assert ours.apply_chat_template(TALK, chat_template="rag") == "rag file"
