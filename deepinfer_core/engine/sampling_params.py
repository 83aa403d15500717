"""What a user asks of the sampler, validated when it is built."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from deepinfer_core.api import GREEDY_TEMPERATURE, ConstraintSpec, InvalidRequestError

from .constraint_request import constraint_of

MAX_INT = 2**31 - 1
LARGEST_FLOAT32 = 2.0**128 - 2.0**104
REPETITION = (1e-6, 1e6)
"""Further from 1 a penalty could make finite float32 logits infinite."""


def _refuse(name: str, value: Any, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={value!r}: expected {expected}")


def real_number(name: str, value: Any, low: float, high: float, expected: str, *, open_low: bool = False) -> float:
    """``value`` as a float, if it is a finite number in ``[low, high]`` (``(low, high]`` with ``open_low``)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(name, value, expected)
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        raise _refuse(name, value, expected) from None
    below = number <= low if open_low else number < low
    if not math.isfinite(number) or below or number > high:
        raise _refuse(name, value, expected)
    return number


def _whole(name: str, value: Any, low: int, high: int, expected: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _refuse(name, value, expected) from None
    if isinstance(value, bool) or number < low:
        raise _refuse(name, value, expected)
    if number > high:
        raise _refuse(name, value, f"{expected}, at most {high}")
    return int(number)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    expected = "a list of token ids (integers >= 0)"
    if value is None:
        return ()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise _refuse(name, value, expected)
    return tuple(_whole(f"{name}[{i}]", item, 0, MAX_INT, "a token id (integer >= 0)") for i, item in enumerate(value))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise _refuse(name, value, "a string or a list of strings")
    if any(not item for item in items):
        raise _refuse(name, value, "non-empty strings")
    if not all(is_text(item) for item in items):
        raise _refuse(name, value, "text without lone surrogates")
    return tuple(items)


def is_text(value: Any) -> bool:
    """A string that UTF-8 can hold."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _logprobs(name: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    return _whole(name, value, -1, MAX_INT, "None, -1 (the whole vocabulary) or a count >= 0")


def _mapping(name: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """``value``, also as the tuple of pairs in which it is stored, so that attrs.evolve works; None is empty."""
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return dict(value)
    if value is not None and not isinstance(value, Mapping):
        raise _refuse(name, value, expected)
    return value or {}


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, bias in _mapping("logit_bias", value, "a mapping of token id to bias").items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        token = _whole("logit_bias key", token, 0, MAX_INT, "a token id (integer >= 0)")
        pairs.append((token, real_number(f"logit_bias[{key!r}]", bias, -1e30, 1e30, "a number in [-1e30, 1e30]")))
    if len({token for token, _ in pairs}) != len(pairs):
        raise _refuse("logit_bias", value, "each token id once")
    return tuple(sorted(pairs))


def _extra_args(value: Any) -> tuple[tuple[str, float], ...]:
    expected, number = "a mapping of argument name to number", "a number in [-1e30, 1e30]"
    given = _mapping("extra_args", value, expected)
    if not all(isinstance(key, str) for key in given):
        raise _refuse("extra_args", value, expected)
    return tuple(sorted((key, real_number(f"extra_args[{key!r}]", v, -1e30, 1e30, number)) for key, v in given.items()))


def _seed(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise _refuse(name, value, "an integer or None") from None
    if isinstance(value, bool):
        raise _refuse(name, value, "an integer or None")
    return int(number) % 2**64


@attrs.frozen(init=False)
class SamplingParams:
    """How one request is sampled. Immutable; wrong types, NaN and infinity raise InvalidRequestError here.

    Args:
        n: completions per prompt, 1 and more. Completion 0 equals the one of ``n=1``.
        temperature: >= 0; below 1e-5 is exactly greedy (argmax, lowest id on ties).
        top_p: in (0, 1]; 1 is off. top_k: 0 or -1 is off. min_p: in [0, 1]; 0 is off.
        max_tokens: output tokens, >= 1, or None for all that fit the context.
        min_tokens: output tokens before which neither EOS, stop ids nor stop strings end the request.
        stop: strings that end the request; found across tokens. stop_token_ids: ids that do.
        seed: any integer, taken modulo 2**64; None draws 64 random bits. ``seq_seed`` is an alias.
        presence_penalty, frequency_penalty: -2 to 2, on output tokens; 0 is off.
        repetition_penalty: 1e-6 to 1e6, on prompt and output tokens; 1 is off.
        logit_bias: token id -> number added to its logit.
        bad_words: strings never generated, at most 512 of at most 64 tokens each.
        allowed_token_ids: the only ids that may be.
        logprobs, prompt_logprobs: how many best alternatives to report beside the token itself; -1 for all.
        logprobs_mode: ``raw`` (before temperature, penalties and masks) or ``processed``.
        ignore_eos: go on after the end-of-sequence token.
        include_stop_str_in_output: keep the matched stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        extra_args: numbers for sampling stages that plugins add, by argument name.
        structured_outputs: what the text must look like, one of ``{"json": schema}``, ``{"json_object": True}``,
            ``{"regex": text}``, ``{"ebnf": text}``, ``{"choice": [text, ...]}``, ``{"structural_tags": tags}``; kept
            as a ConstraintSpec. Needs a plugin. ``so_args`` says the same in the original engine's words:
            ``schema_type``, ``schema``, ``trigger_token_ids``, ``bound_token_id``.
    """

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    bad_words: tuple[str, ...]
    allowed_token_ids: tuple[int, ...] | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: Literal["raw", "processed"]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    extra_args: tuple[tuple[str, float], ...]
    structured_outputs: ConstraintSpec | None

    def __init__(
        self,
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        seq_seed: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[str] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        extra_args: Mapping[str, float] | None = None,
        structured_outputs: Mapping[str, Any] | ConstraintSpec | None = None,
        so_args: Mapping[str, Any] | None = None,
    ) -> None:
        if seed is not None and seq_seed is not None and seed != seq_seed:
            raise InvalidRequestError(f"seed={seed!r} and seq_seed={seq_seed!r}: seq_seed is an alias; give one")
        heat = real_number("temperature", temperature, 0.0, math.inf, "a finite number >= 0")
        limit = None if max_tokens is None else _whole("max_tokens", max_tokens, 1, MAX_INT, "an integer >= 1, or None")
        floor = _whole("min_tokens", min_tokens, 0, MAX_INT, "an integer >= 0")
        if limit is not None and floor > limit:
            raise _refuse("min_tokens", min_tokens, f"at most max_tokens={limit}")
        if not isinstance(logprobs_mode, str) or logprobs_mode not in ("raw", "processed"):
            raise _refuse("logprobs_mode", logprobs_mode, "'raw' or 'processed'")
        top = _whole("top_k", top_k, -1, 2**63 - 1, "0 or -1 (off), or a count >= 1")
        allowed = None if allowed_token_ids is None else _token_ids("allowed_token_ids", allowed_token_ids)
        if allowed is not None and not allowed:
            raise _refuse("allowed_token_ids", allowed_token_ids, "at least one id, or None")
        self.__attrs_init__(
            n=_whole("n", n, 1, 2**63 - 1, "an integer >= 1"),
            temperature=0.0 if heat < GREEDY_TEMPERATURE else min(heat, LARGEST_FLOAT32),
            top_p=real_number("top_p", top_p, 0.0, 1.0, "a number in (0, 1]", open_low=True),
            top_k=min(max(top, 0), MAX_INT),
            min_p=real_number("min_p", min_p, 0.0, 1.0, "a number in [0, 1]"),
            max_tokens=limit,
            min_tokens=floor,
            stop=_strings("stop", stop),
            stop_token_ids=_token_ids("stop_token_ids", stop_token_ids),
            seed=_seed("seed", seed if seed is not None else seq_seed),
            presence_penalty=real_number("presence_penalty", presence_penalty, -2.0, 2.0, "a number in [-2, 2]"),
            frequency_penalty=real_number("frequency_penalty", frequency_penalty, -2.0, 2.0, "a number in [-2, 2]"),
            repetition_penalty=real_number(
                "repetition_penalty", repetition_penalty, *REPETITION, "a number in [1e-6, 1e6]"
            ),
            logit_bias=_logit_bias(logit_bias),
            bad_words=_strings("bad_words", bad_words),
            allowed_token_ids=allowed,
            logprobs=_logprobs("logprobs", logprobs),
            prompt_logprobs=_logprobs("prompt_logprobs", prompt_logprobs),
            logprobs_mode=logprobs_mode,
            ignore_eos=_flag("ignore_eos", ignore_eos),
            include_stop_str_in_output=_flag("include_stop_str_in_output", include_stop_str_in_output),
            skip_special_tokens=_flag("skip_special_tokens", skip_special_tokens),
            extra_args=_extra_args(extra_args),
            structured_outputs=constraint_of(structured_outputs, so_args),
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
