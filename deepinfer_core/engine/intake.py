"""From what a user passes to validated requests. Nothing is queued before everything was checked."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import InvalidRequestError, StageArgument
from deepinfer_core.tokenizer import IncrementalDetokenizer, Tokenizer

from .block_hash import domain_key
from .constraint import Constraints
from .outputs import RequestMetrics
from .request import Request
from .request import Sequence as RequestSequence
from .sampling_params import SamplingParams, is_text, real_number

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}`` with request fields beside it."""

PROMPT_FIELDS = ("prompt", "prompt_token_ids")
REQUEST_FIELDS = ("priority", "tenant", "deadline_ms", "ttft_target_ms", "tpot_target_ms", "timeout_ms", "cache_salt")
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 512, 64
"""Every slot has a table of as many and as long bad words as any request ever had."""
MAX_PRIORITY = 2**63 - 1
MAX_MILLISECONDS = 1e300
WHOLE_VOCABULARY_LIMIT = 4_000_000
"""Log-probabilities a request may report in all (positions times alternatives) before it is refused."""


@attrs.frozen(kw_only=True)
class Limits:
    """What a request is checked against. ``capacity`` is the tokens the cache can hold of one request."""

    vocab_size: int
    max_model_len: int
    capacity: int
    max_running: int
    max_batch_tokens: int
    chunked_prefill: bool
    eos_token_ids: tuple[int, ...]
    cache_domain: tuple[str, ...]
    extra_arguments: Mapping[str, StageArgument] = attrs.field(factory=dict)


def split_prompts(prompts: Any) -> list[Prompt]:
    """A single prompt or a batch -> list of prompts. ``[1, 2, 3]`` is one prompt, ``[[1], [2]]`` two."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts={prompts!r}: expected a string, a list of token ids, a mapping, or a list of these"
        )
    if prompts and all(_is_id(item) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def split_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequestError(f"sampling_params={params!r}: expected SamplingParams, a list of them, or None")
    if len(params) != count:
        raise InvalidRequestError(f"sampling_params has {len(params)} entries for {count} prompts: give one each")
    return list(params)


class Intake:
    """Validates prompts and parameters and makes requests of them."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None, constraints: Constraints | str) -> None:
        """``constraints``: who compiles grammars, or why nobody does."""
        self.limits = limits
        self.tokenizer = tokenizer
        self.constraints = constraints
        self._numbers = itertools.count(1)

    def request(self, request_id: str, prompt: Prompt, params: SamplingParams, *, now: float, stream: bool) -> Request:
        """A validated request with its sequences, not yet queued.

        Raises:
            InvalidRequestError: names the request, the field, the value and what was expected.
        """
        try:
            return self._request(request_id, prompt, params, now, stream)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"request {request_id}: {error}") from None

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams, now: float, stream: bool) -> Request:
        text, ids, fields = self._read(prompt)
        self._check_params(params, len(ids))
        limits = self.limits
        longest = min(limits.max_model_len, limits.capacity)
        max_len = longest if params.max_tokens is None else min(longest, len(ids) + params.max_tokens)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        eos = () if params.ignore_eos else limits.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            seed=seed,
            root_key=domain_key(*limits.cache_domain, fields.get("cache_salt") or ""),
            max_len=max_len,
            eos_token_ids=eos,
            stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
            bad_word_ids=self._bad_words(params),
            streams=stream,
            priority=fields.get("priority") or 0,
            tenant=fields.get("tenant") or "",
            deadline=_after(now, fields.get("deadline_ms")),
            ttft_target=_seconds(fields.get("ttft_target_ms")),
            tpot_target=_seconds(fields.get("tpot_target_ms")),
            expires=_after(now, fields.get("timeout_ms")),
            metrics=RequestMetrics(arrival=now),
        )
        tokens = np.array(ids, np.int32)
        for child in range(params.n):
            sequence = RequestSequence(request=request, child=child, number=next(self._numbers), tokens=tokens)
            if self.tokenizer is not None and (stream or params.stop):
                sequence.detokenizer = IncrementalDetokenizer(
                    self.tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=params.stop,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            sequence.logprobs = None if params.logprobs is None else []
            watched = stream or bool(params.stop) or params.logprobs is not None
            sequence.needs_host = watched or params.structured_outputs is not None
            request.sequences.append(sequence)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        return request

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int], dict[str, Any]]:
        fields: dict[str, Any] = {}
        if isinstance(prompt, Mapping):
            fields = {k: v for k, v in prompt.items() if k not in PROMPT_FIELDS}
            _check_fields(fields)
            given = [k for k in PROMPT_FIELDS if prompt.get(k) is not None]
            if len(given) != 1:
                raise InvalidRequestError(f"prompt={dict(prompt)!r}: give 'prompt' or 'prompt_token_ids', one of them")
            prompt = prompt[given[0]]
        if isinstance(prompt, str):
            if not is_text(prompt):
                raise InvalidRequestError(f"prompt={prompt!r}: expected text without lone surrogates")
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "prompt is text, but the checkpoint has no tokenizer: pass token ids, or set model.tokenizer"
                )
            self.tokenizer.check_length(prompt, self.limits.max_model_len)
            text, ids = prompt, self.tokenizer.encode(prompt)
        else:
            text, ids = None, self._ids(prompt)
        self._check_length(ids)
        return text, ids, fields

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if isinstance(prompt, bytes | bytearray) or not (isinstance(prompt, Sequence) and all(map(_is_id, prompt))):
            raise InvalidRequestError(f"prompt={prompt!r}: expected text or a list of token ids")
        ids = [int(item) for item in prompt]
        for position, token in enumerate(ids):
            if not 0 <= token < self.limits.vocab_size:
                raise InvalidRequestError(
                    f"prompt_token_ids[{position}]={token}: expected an id in [0, {self.limits.vocab_size})"
                )
        return ids

    def _check_length(self, ids: list[int]) -> None:
        limits = self.limits
        if not ids:
            raise InvalidRequestError("prompt is empty: expected at least one token")
        if len(ids) >= limits.max_model_len:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens: expected fewer than max_model_len={limits.max_model_len}: shorten it, "
                "or raise model.max_model_len as far as the checkpoint goes"
            )
        if len(ids) >= limits.capacity:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens, the cache holds {limits.capacity}: raise kv_cache.num_blocks"
            )
        if not limits.chunked_prefill and len(ids) > limits.max_batch_tokens:
            raise InvalidRequestError(
                f"prompt has {len(ids)} tokens, scheduling.max_batch_tokens={limits.max_batch_tokens} and "
                "scheduling.chunked_prefill is off: raise the one or switch on the other"
            )

    def _check_params(self, params: SamplingParams, prompt_len: int) -> None:
        limits = self.limits
        if params.n > limits.max_running:
            raise InvalidRequestError(f"n={params.n}: expected at most scheduling.max_running={limits.max_running}")
        if (params.stop or params.bad_words) and self.tokenizer is None:
            raise InvalidRequestError("stop and bad_words are text, but the checkpoint has no tokenizer")
        self._check_extra(params)
        self._check_constraint(params)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for item in getattr(params, name) or ():
                token = item[0] if isinstance(item, tuple) else item
                if token >= limits.vocab_size:
                    raise InvalidRequestError(f"{name}: id {token}: expected an id in [0, {limits.vocab_size})")
        new_tokens = min(limits.max_model_len, prompt_len + (params.max_tokens or limits.max_model_len)) - prompt_len
        for name, positions in (("logprobs", new_tokens * params.n), ("prompt_logprobs", prompt_len)):
            wanted = getattr(params, name)
            if wanted is None:
                continue
            width = limits.vocab_size if wanted == -1 else min(wanted, limits.vocab_size)
            if positions * width > WHOLE_VOCABULARY_LIMIT:
                raise InvalidRequestError(
                    f"{name}={wanted}: {positions} positions of {width} entries are more than "
                    f"{WHOLE_VOCABULARY_LIMIT}: ask for fewer alternatives or tokens"
                )

    def _check_constraint(self, params: SamplingParams) -> None:
        spec = params.structured_outputs
        if spec is None:
            return
        if isinstance(self.constraints, str):
            raise InvalidRequestError(f"structured_outputs: {self.constraints}")
        bound = () if spec.bound_token_id is None else (spec.bound_token_id,)
        for name, ids in (("trigger_token_ids", spec.trigger_token_ids), ("bound_token_id", bound)):
            for token in ids:
                if token >= self.limits.vocab_size:
                    raise InvalidRequestError(
                        f"so_args[{name!r}]: id {token}: expected an id in [0, {self.limits.vocab_size})"
                    )
        self.constraints.check(spec)

    def _check_extra(self, params: SamplingParams) -> None:
        known = self.limits.extra_arguments
        for name, value in params.extra_args:
            argument = known.get(name)
            if argument is None:
                loaded = f"loaded plugins know {', '.join(sorted(known))}" if known else "no loaded plugin adds any"
                raise InvalidRequestError(f"extra_args[{name!r}]: no sampling stage has this argument; {loaded}")
            if not argument.low <= value <= argument.high:
                raise InvalidRequestError(
                    f"extra_args[{name!r}]={value!r}: expected a number in [{argument.low}, {argument.high}]"
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word: as it starts a text, and as it follows a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        if len(params.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words: {len(params.bad_words)} of them: expected at most {MAX_BAD_WORDS}")
        found = dict.fromkeys(
            tuple(self.tokenizer.encode(prefix + word, add_special_tokens=False))
            for word in params.bad_words
            for prefix in ("", " ")
        )
        longest = max(map(len, found))
        if longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"bad_words: one has {longest} tokens: expected at most {MAX_BAD_WORD_TOKENS}")
        return tuple(ids for ids in found if ids)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name not in REQUEST_FIELDS:
            known = ", ".join((*PROMPT_FIELDS, *REQUEST_FIELDS))
            raise InvalidRequestError(f"prompt field {name!r}: expected one of {known}")
        if value is None:
            continue
        if name in ("tenant", "cache_salt"):
            if not is_text(value):
                raise InvalidRequestError(f"{name}={value!r}: expected a string")
        elif name == "priority":
            if not _is_id(value) or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
                raise InvalidRequestError(f"priority={value!r}: expected an integer of at most 63 bits")
        else:
            real_number(name, value, 0.0, MAX_MILLISECONDS, "a number > 0 (milliseconds)", open_low=True)


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is no duration."""
    real_number(name, value, 0.0, MAX_MILLISECONDS / 1000, "a number of seconds > 0, or None", open_low=True)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else float(milliseconds) / 1000


def _after(now: float, milliseconds: float | None) -> float | None:
    return None if milliseconds is None else now + float(milliseconds) / 1000
