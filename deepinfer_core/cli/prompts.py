"""Where prompts come from: the command line, a JSONL file, or standard input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
import click

from deepinfer_core.api import InvalidRequestError

from .streams import read_input

_KINDS = ("prompt", "messages", "prompt_token_ids")


@attrs.frozen(kw_only=True)
class PromptItem:
    """One prompt: text, token ids, or the messages of a conversation; exactly one is set.

    Attributes:
        sampling: arguments of SamplingParams for this prompt alone.
        origin: where it was read, for errors; empty for the command line.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    origin: str = ""

    @property
    def prompt(self) -> str | list[int]:
        """Text or token ids, of a prompt that is no conversation."""
        return self.text if self.text is not None else self.token_ids or []


def read_prompts(prompts: Sequence[str], file: str | None, stdin: TextIO | None, *, chat: bool) -> list[PromptItem]:
    """All prompts, in order.

    Args:
        prompts: of the command line. When there are none, and no file, ``stdin`` is read whole, as one prompt
            without its final line break.
        file: a JSONL file, or ``-`` for ``stdin``.
        chat: make each text the user's message of a conversation.

    Raises:
        InvalidRequestError: a line of the file is no prompt; names file and line.
        click.UsageError: there is no prompt, or there are two sources.
    """
    if prompts and file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both")
    if file is not None:
        items = _read_file(file, stdin)
    elif prompts:
        items = [PromptItem(text=_checked(text)) for text in prompts]
    else:
        text = "" if stdin is None or stdin.isatty() else read_input(stdin).removesuffix("\n")
        if not text:
            raise click.UsageError("no prompt: give --prompt, --prompt-file, or text on standard input")
        items = [PromptItem(text=text)]
    return [_as_chat(item) for item in items] if chat else items


def _checked(text: str) -> str:
    """An argument that was given as text, not as bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"--prompt {text!r:.200}: character {error.start} is not UTF-8 text; use --prompt-file, or iconv"
        ) from None
    return text


def _read_file(file: str, stdin: TextIO | None) -> list[PromptItem]:
    name = "standard input" if file == "-" else file
    try:
        text = read_input(stdin) if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidRequestError(f"prompt file {name}: {reason}") from None
    # Only \n ends a line: JSON strings may hold the other characters that str.splitlines breaks at.
    items = list(_parse_lines(text.split("\n"), name))
    if not items:
        raise InvalidRequestError(f"prompt file {name}: holds no prompt")
    return items


def _parse_lines(lines: Iterable[str], name: str) -> Iterable[PromptItem]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{name}:{number}")


def _parse(line: str, origin: str) -> PromptItem:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{origin}: not JSON: {error}") from None
    kinds = [kind for kind in _KINDS if isinstance(record, dict) and kind in record]
    if len(kinds) != 1:
        raise InvalidRequestError(f"{origin}: expected an object with one of {', '.join(_KINDS)}")
    value = record.pop(kinds[0])
    if kinds == ["prompt"]:
        _check(isinstance(value, str), origin, "prompt", value, "a string")
        return PromptItem(text=value, sampling=record, origin=origin)
    if kinds == ["messages"]:
        is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
        _check(is_list, origin, "messages", value, "a list of objects with role and content")
        return PromptItem(messages=value, sampling=record, origin=origin)
    is_list = isinstance(value, list) and all(type(token) is int for token in value)
    _check(is_list, origin, "prompt_token_ids", value, "a list of integers")
    return PromptItem(token_ids=value, sampling=record, origin=origin)


def _check(holds: bool, origin: str, field: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{origin}: {field}={value!r:.200}: expected {expected}")


def _as_chat(item: PromptItem) -> PromptItem:
    if item.token_ids is not None:
        raise InvalidRequestError(f"{item.origin}: prompt_token_ids cannot be a chat message; leave out --chat")
    if item.messages is not None:
        return item
    return attrs.evolve(item, text=None, messages=[{"role": "user", "content": item.text}])
