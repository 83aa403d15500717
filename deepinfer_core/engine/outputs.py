"""What a request gives back: one object per request, always, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorCode = Literal["nan_logits", "no_allowed_token", "rejected", "timeout", "out_of_memory", "internal"]
"""Every code a :class:`RequestError` may carry.

* ``nan_logits``: the model gave NaN or infinite logits for this request's row.
* ``no_allowed_token``: masks and bans left no token to choose.
* ``rejected``: the scheduling policy refused the request.
* ``timeout``: the request's own time limit passed.
* ``out_of_memory``: the device has no room for this request even when it runs alone.
* ``internal``: an operator or plugin raised while it handled this request.
"""


@attrs.frozen
class RequestError:
    """Why a request ended with ``finish_reason == "error"``."""

    code: ErrorCode
    message: str


@attrs.frozen
class Logprob:
    """Natural log-probability of a token, its rank (1 is the most likely) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


TokenLogprobs = Mapping[int, Logprob]
"""Token id -> :class:`Logprob`, for one position: the token itself and the best alternatives."""


@attrs.define
class CompletionOutput:
    """One completion.

    Attributes:
        index: child index, 0 for ``n=1``.
        text: decoded output; empty when the checkpoint has no tokenizer.
        token_ids: output ids, up to and including the token that ended it.
        logprobs: one mapping per output token, or None when not asked for.
        finish_reason: None while running. stop_reason: the stop string or id that matched, None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@attrs.define
class RequestMetrics:
    """Times of one request, seconds on one monotonic clock (``arrival`` is its zero point's name only).

    ``cached_tokens`` is what the prefix cache gave; ``preemptions`` counts how often it had to start again.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@attrs.define
class RequestOutput:
    """The result of one prompt.

    Attributes:
        prompt: text, or None for a token-id prompt.
        prompt_logprobs: one entry per prompt token (None for the first), or None when not asked for.
        outputs: one per child, in child order.
        error: set iff a child ended with ``error``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@attrs.frozen
class StreamDelta:
    """What one completion gained since the last delta. The last one carries the finish reason.

    Text is final. Where one stop string begins like another, ``token_ids`` may run past the match that counts by
    the tokens it took to tell them apart; the RequestOutput has them cut.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
