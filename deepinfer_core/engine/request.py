"""Requests and their sequences: what was asked, and how far each completion has come."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from .outputs import FinishReason, RequestError, RequestMetrics, StreamDelta, TokenLogprobs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .constraint import Constrained

Status = Literal["waiting", "running", "finished"]


@attrs.define(eq=False, kw_only=True)
class Request:
    """One prompt with its parameters, validated. ``sequences`` holds one entry per completion.

    ``root_key`` is the content key all its blocks descend from; ``max_len`` the length, prompt included, at
    which it ends; ``eos_token_ids`` are masked below min_tokens, and ``stop_token_ids`` (those included) end it;
    ``prompt_rows_planned`` the first prompt position whose log-probability is still to be asked; ``outbox`` what
    a stream has not yet fetched.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    root_key: bytes
    max_len: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    streams: bool = False
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    expires: float | None = None
    metrics: RequestMetrics
    sequences: list[Sequence] = attrs.field(factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_rows_planned: int = 1
    outbox: deque[StreamDelta] = attrs.field(factory=deque)

    @property
    def finished(self) -> bool:
        return all(s.status == "finished" for s in self.sequences)

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt logprobs need every prompt row computed."""
        return self.params.prompt_logprobs is None


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One completion of a request.

    While it runs, its tokens live in the slot tables; ``tokens`` holds them whenever it does not.

    Attributes:
        number: arrival number, unique and increasing; ties of arrival go by it.
        tokens: known tokens, prompt first, int32.
        keys: content keys of its filled blocks, as far as they were computed.
        slot: row in the slot tables while running, else -1.
        needs_host: its committed tokens must be looked at one by one (text, logprobs).
        streamed: how many output tokens the stream's deltas have carried.
        logprobs: of the output tokens, when asked for.
        constraint: its grammar, when it has one.
    """

    request: Request
    child: int
    number: int
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    keys: list[bytes] = attrs.field(factory=list)
    slot: int = -1
    status: Status = "waiting"
    needs_host: bool = False
    streamed: int = 0
    detokenizer: Any = None
    constraint: Constrained | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    waiting_for: str = "queued"

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)
