"""What a request gives back: one object per request, always, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from .timeline import TimelineEvent

FinishReason = Literal["stop", "length", "abort", "error"]

ErrorCode = Literal["nan_logits", "no_allowed_token", "constraint", "rejected", "timeout", "out_of_memory", "internal"]
"""Every code a :class:`RequestError` may carry.

* ``nan_logits``: the model gave NaN or infinite logits for this request's row.
* ``no_allowed_token``: masks and bans left no token to choose.
* ``constraint``: the grammar of the output could not be compiled, or failed later.
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
    """One request's times and counts, over all its completions. Times are seconds on the engine's monotonic clock.

    Attributes:
        first_scheduled: when it first got into a step. first_token: when the first token of any completion was known.
        cached_tokens: what the prefix cache gave. preemptions: how often a completion had to start again.
        output_tokens: of all completions. longest_output: of the longest one.
        proposed_drafts, accepted_drafts: draft tokens verified, and those of them that were right.
        forced_tokens: tokens that a grammar left no choice about, taken without a step of their own.
        timeline: ``(time, event, detail)``, in order of time; see :class:`TimelineEvent`.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    longest_output: int = 0
    proposed_drafts: int = 0
    accepted_drafts: int = 0
    forced_tokens: int = 0
    timeline: list[TimelineEvent] = attrs.field(factory=list)

    @property
    def queue_time(self) -> float | None:
        """From arrival to the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, of the longest completion; None before the end, or for one token."""
        if self.first_token is None or self.finished is None or self.longest_output < 2:
            return None
        return (self.finished - self.first_token) / (self.longest_output - 1)

    @property
    def e2e(self) -> float | None:
        """From arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival


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
