"""Sampling: stages in a fixed order, each replaceable, over device-resident request state.

Order (``STAGES``): mask -> bias -> penalties -> temperature -> min_p -> top_k -> top_p -> draw. ``logprobs``
reads the logits before the first stage (raw) or the ones given to draw (processed).

A worked vector that tells this order from the others: logits ``[2, 1, 0, 9]`` for ids 0..3; id 3 masked;
bias +3 on id 2 gives ``[2, 1, 3, -inf]``; output so far ``[2, 2]`` with frequency 1.0 and repetition 2.0:
repetition first (3/2 = 1.5), then 2 * 1.0 subtracted gives ``[2, 1, -0.5, -inf]``; temperature 0.5, applied to
``logit - max``, gives ``[0, -2, -5, -inf]``; min_p 0.05 keeps ids 0 and 1 (e^-2 = 0.135; e^-5 = 0.007); top_k 3
changes nothing; top_p 0.88 on the renormalised rest (0.881, 0.119) keeps id 0 alone (of all three, 0.876: id 1 too).
With min_p off and top_k 2 instead, top_p again sees (0.881, 0.119) and keeps id 0 alone.

A row whose parameters leave a stage off passes it bit for bit unchanged, since a stage runs as soon as one row of
the step needs it.

Randomness (``draw``): Philox4x32-10 (Salmon et al. 2011) with key = the request's 64-bit seed, low word
first, and counter = (token_id div 4, child index, low word, high word of 3 * position + purpose); purposes
0 draw, 1 residual, 2 coin; ``w`` is word ``token_id mod 4`` of the result. With
``E = -log1p(-(w + 0.5) * 2^-32)`` in float32 (the product rounded to float32 and capped at 1 - 2^-24, so that E is
finite) the token at a position is ``argmax(processed logits - log E)``, lowest id on ties: an exact draw from
softmax(processed logits) that depends on nothing but logits, seed, child and position. E, and log E of that E, are
the float64 results rounded to float32: float32 logarithms of two libraries differ in the last bit, these do not
(compared for all 83,886,081 values that the product can take). Identity is promised per device type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch

STAGES = ("mask", "bias", "penalties", "temperature", "min_p", "top_k", "top_p", "draw")
"""Every sampling stage, in the order in which they run."""

PURPOSE_DRAW, PURPOSE_RESIDUAL, PURPOSE_COIN = 0, 1, 2

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are exactly greedy: argmax, lowest id."""


@attrs.define(kw_only=True)
class SamplingState:
    """Device-resident parameters and history of the running requests, one row per slot (S slots).

    Rows are written when a request takes its slot and stay valid until it leaves it. Wide fields
    (stop ids, bias, bad words) are padded with -1 and grow when a request needs more.

    Attributes:
        history: ``[S, L]`` int32, token at each absolute position, prompt included. ``runner.append_tokens``
            adds what was drawn.
        prompt_len: ``[S]`` int64.
        temperature, min_p, top_p: ``[S]`` float32; off is 1.0, 0.0, 1.0. Greedy is temperature 0.
        top_k: ``[S]`` int64; 0 is off.
        presence, frequency, repetition: ``[S]`` float32; off is 0, 0, 1.
        seed_lo, seed_hi, child: ``[S]`` int64 holding unsigned 32-bit words.
        min_end: ``[S]`` int64; ids in ``stop_ids`` are masked at positions below it (min_tokens).
        stop_ids: ``[S, K]`` int64.
        bias_ids, bias_values: ``[S, B]`` int64 and float32.
        bad_words: ``[S, W, N]`` int64, right-aligned sequences padded on the left with -1.
        extra: argument of a plugin's stage -> ``[S]`` float32.
        allowed: ``[S, ceil(V/32)]`` int32 bit mask (bit set: allowed), or None when no request restricts.
    """

    history: torch.Tensor
    prompt_len: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    seed_lo: torch.Tensor
    seed_hi: torch.Tensor
    child: torch.Tensor
    min_end: torch.Tensor
    stop_ids: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    bad_words: torch.Tensor
    allowed: torch.Tensor | None
    extra: Mapping[str, torch.Tensor] = attrs.field(factory=dict)


@attrs.define(kw_only=True)
class SamplingBatch:
    """The rows sampled in one step: N rows, of which several may share a slot (drafts being verified).

    Attributes:
        state: parameters and history.
        slots: ``[N]`` int64, slot of each row.
        positions: ``[N]`` int64, absolute position of the token each row produces.
        token_limit: ids at or above it are padding of the vocabulary and always masked.
        active: names of the stages that some row needs; others are not called.
        grammar: ``[N, ceil(V/32)]`` int32 bit mask over the logits' width, or None.
        max_position: host upper bound of ``positions``, to bound history reads.
    """

    state: SamplingState
    slots: torch.Tensor
    positions: torch.Tensor
    token_limit: int
    active: frozenset[str]
    max_position: int
    grammar: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class SamplingRequest(OpRequest):
    """Asks for one stage (``stage`` of :data:`STAGES`, or a plugin's), or for ``logprobs``."""

    op: ClassVar[str] = "sampling.stage"

    stage: str
    vocab_size: int


@attrs.frozen(kw_only=True)
class JudgedRows:
    """Rows of a step whose next draft is judged by rejection.

    Attributes:
        rows: ``[J]`` int64, numbers among the N sampled rows.
        drafts: ``[J]`` int64, the token drafted for each.
        scores: ``[J, V]`` float32 whose softmax the drafts were drawn from; None: each was certain.
    """

    rows: torch.Tensor
    drafts: torch.Tensor
    scores: torch.Tensor | None


class Verify(Protocol):
    """Speculative rejection sampling (Leviathan et al. 2023), after the draw; a provider of stage ``verify``."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch, tokens: torch.Tensor, judged: JudgedRows) -> torch.Tensor:
        """Tokens of all rows, those of the judged ones replaced.

        With p = softmax(logits) and d = softmax(scores): the draft x if ``u < p(x) / d(x)``, u the coin of the row's
        position (``(w + 0.5) * 2^-32``, purpose 2, word 0 of token 0); otherwise a draw from ``max(p - d, 0)`` with
        the residual noise (purpose 1), or from p should that be empty. Scores that are no distribution (NaN, +inf,
        nothing but -inf) cost their draft: the token is drawn from p with the residual noise.

        Args:
            logits: ``[N, V]`` float32, as given to draw (not changed). tokens: ``[N]`` int64 that draw gave; -1 stays.
        """
        ...


class Stage(Protocol):
    """One step of turning logits into a distribution.

    A provider declares the caps ``spec_verify`` (right when several rows share a slot, each at its own
    position) and ``device_state`` (reads nothing but the state and the batch, so that it may be launched
    before the host has seen the last step's tokens). With a drafter the plan demands the first, one step ahead the
    second: a provider without it is not eligible. ``scheduling.async_scheduling = "auto"`` goes one step ahead only
    when every stage can.
    """

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> ``[N, V]`` float32; may write in place; must return the result.

        Removed tokens become -inf. Rows are independent of each other, bit by bit. N may be 0.
        """
        ...


class Draw(Protocol):
    """The last stage."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> ``[N]`` int64 token ids.

        Greedy rows take the argmax, others the seeded draw above; lowest id on ties. A row with a NaN, a
        +inf, or nothing but -inf gives -1 and touches no other row.
        """
        ...


@attrs.define
class LogprobsResult:
    """Log-probabilities of N rows, natural log.

    Attributes:
        chosen: ``[N]`` float32, of the chosen token.
        rank: ``[N]`` int64, 1 for the most likely; ties share the best rank's order (higher score, then lower id).
        top_ids, top: ``[N, K]`` int64 and float32, by score descending, then id ascending.
    """

    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class Logprobs(Protocol):
    """log-softmax of logits at chosen and best tokens."""

    def run(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """``[N, V]`` float32 logits (not changed), ``[N]`` ids, k >= 0 -> :class:`LogprobsResult`."""
        ...
