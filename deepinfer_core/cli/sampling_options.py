"""Options of sampling, each named as the argument of SamplingParams that it sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

DEFAULT_MAX_TOKENS = 256


def _biases(ctx: click.Context, parameter: click.Parameter, items: Sequence[str]) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for item in items:
        token, _, bias = item.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{item!r}: expected TOKEN_ID=BIAS, as in 42=-1.5") from None
    return biases or None


def _file_text(ctx: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise click.BadParameter(f"{path!r} cannot be read: {reason}") from None


_FORMS = {"json_schema": "json", "regex": "regex", "grammar": "ebnf"}
"""Option -> key of structured_outputs."""

_OPTIONS = (
    click.option("--max-tokens", type=int, help=f"Most tokens to write.  [default: {DEFAULT_MAX_TOKENS}]"),
    click.option("--min-tokens", type=int, help="Fewest tokens before anything may end the text."),
    click.option("--temperature", type=float, help="0 always takes the most likely token.  [default: 1]"),
    click.option("--top-p", type=float, help="Keep the likeliest tokens whose probabilities reach this sum."),
    click.option("--top-k", type=int, help="Keep this many of the likeliest tokens."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--seed", type=int, help="Same seed, same text."),
    click.option("-n", "--n", type=int, help="Completions of each prompt."),
    click.option("--stop", metavar="TEXT", multiple=True, help="Ends the text; may be repeated."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="Ends the text; may be repeated."),
    click.option("--include-stop", "include_stop_str_in_output", is_flag=True, help="Keep the matched --stop text."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
    click.option("--presence-penalty", type=float, help="-2 to 2, on tokens already written."),
    click.option("--frequency-penalty", type=float, help="-2 to 2, by how often a token was written."),
    click.option("--repetition-penalty", type=float, help="1e-6 to 1e6, on tokens of prompt and text; 1 is off."),
    click.option(
        "--logit-bias", metavar="ID=BIAS", multiple=True, callback=_biases, help="Added to a token's logit; repeatable."
    ),
    click.option("--bad-word", "bad_words", metavar="TEXT", multiple=True, help="Never written; may be repeated."),
    click.option("--allowed-token-id", "allowed_token_ids", type=int, multiple=True, help="No other; may be repeated."),
    click.option("--show-special-tokens", is_flag=True, help="Keep special tokens in the text."),
    click.option(
        "--json-schema", metavar="FILE", callback=_file_text, help="The text is JSON that this JSON Schema accepts."
    ),
    click.option("--regex", metavar="PATTERN", help="The whole text matches this regular expression."),
    click.option(
        "--grammar", metavar="FILE", callback=_file_text, help="The text follows this EBNF, from its rule root."
    ),
    click.option("--logprobs", type=int, help="With --json: this many likeliest tokens at each position."),
    click.option("--prompt-logprobs", type=int, help="With --json: the same for the prompt's tokens."),
    click.option(
        "--logprobs-mode",
        type=click.Choice(["raw", "processed"]),
        help="Before or after temperature, penalties, masks.",
    ),
)

NAMES = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs", "logprobs_mode",
)  # fmt: skip


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; :func:`sampling_arguments` takes their values apart again."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def sampling_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for SamplingParams: what was given, and the program's own limit of tokens."""
    arguments: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    for name in NAMES:
        value = values[name]
        # By identity: a temperature of 0 is a value, and equals False.
        if value is not None and value is not False and value != ():
            arguments[name] = list(value) if isinstance(value, tuple) else value
    if values["show_special_tokens"]:
        arguments["skip_special_tokens"] = False
    forms = {option: values[option] for option in _FORMS if values[option] is not None}
    if len(forms) > 1:
        raise click.UsageError(f"--{' and --'.join(forms).replace('_', '-')} are different forms: give one of them")
    for option, text in forms.items():
        arguments["structured_outputs"] = {_FORMS[option]: text}
    return arguments
