"""Chat templates: Jinja programs of a checkpoint, rendered in a sandbox as Hugging Face defines them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import attrs
import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepinfer_core.api import CheckpointError, InvalidRequestError

DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"


@attrs.frozen(kw_only=True)
class ChatTemplates:
    """The templates of a tokenizer.

    Attributes:
        templates: name -> Jinja source. A sole template is called ``"default"``.
        special_tokens: variables every template sees, e.g. ``bos_token``.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]

    def choose(self, template: str | None, *, tools: bool) -> str:
        """The source to render: a named template, a source given as such, or the tokenizer's default."""
        if template is not None:
            if not isinstance(template, str):
                raise InvalidRequestError(f"chat_template={template!r}: expected Jinja source, or a template's name")
            return self.templates.get(template, template)
        if tools and TOOL_NAME in self.templates:
            return self.templates[TOOL_NAME]
        if DEFAULT_NAME in self.templates:
            return self.templates[DEFAULT_NAME]
        if self.templates:
            raise InvalidRequestError(
                f"chat_template: none of this model's templates is the default; name one of {sorted(self.templates)}"
            )
        raise InvalidRequestError("messages: this model has no chat template; give a prompt, or pass chat_template=")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text of ``messages``; their fields that are None are left out, as templates expect.

        Raises InvalidRequestError with the template's own reason when it refuses or fails, CheckpointError when one of
        the tokenizer's own is none.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(f"messages={messages!r}: expected a list of mappings with 'role' and 'content'")
        values: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens, **variables}
        source = self.choose(template, tools=values["tools"] is not None)
        try:
            program = _compile(source)
        except CheckpointError as error:
            if source in self.templates.values():
                raise
            raise InvalidRequestError(f"chat_template={source!r:.200}: {error}") from error
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return program.render(messages=plain, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # the template is the checkpoint's code: it can raise anything
            raise InvalidRequestError(f"messages: the chat template refused them: {error}{_lacking(plain)}") from error


def _lacking(messages: Sequence[Mapping[str, Any]]) -> str:
    """What most templates need and a message has not."""
    for place, message in enumerate(messages):
        for name in ("role", "content"):
            if name not in message:
                return f"; messages[{place}]={dict(message)!r:.200} has no {name!r}"
    return ""


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes, which would reach the model as text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
