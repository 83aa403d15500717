"""Speculation: a drafter guesses ahead, the engine verifies. Provisional until two plugins use it.

The engine owns verification, positions and rollback. It runs the target model over the last token and the
drafts in one step and gives every row its own token; a draft is accepted iff it equals the token of the row before
it. Two rules decide that token (``speculation.verify``):

* *exact*: the token is drawn with the noise of its position and the history it would have had. Output is what it
  would have been without drafts, for greedy and seeded requests alike, up to how the model's numerics depend on the
  number of rows.
* *rejection* (Leviathan et al. 2023, arXiv:2211.17192), for requests without a seed: draft x, drawn from d, is taken
  with probability ``min(1, p(x)/d(x))``; otherwise the token comes from ``max(p - d, 0)``. Exact in distribution.

A drafter reads tokens on the host (:class:`Drafter`), which makes the loop synchronous, or works on the device within
the step (:class:`DeviceDrafter`), perhaps with a draft module that the engine built for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .provider import LazyRef

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .model import ModelBatch
    from .sampling import SamplingState

Reads = Literal["tokens", "history", "module"]

FRESH_TOKENS = 8
"""Sampled tokens with which a request is no longer at the beginning of its text."""


@attrs.frozen(kw_only=True)
class DraftRow:
    """One request that is about to decode.

    Attributes:
        request_id, child: which completion; ``child`` is its index.
        tokens: ``[L]`` int32, prompt and output so far, read-only; valid during the call only.
        prompt_len: how many of them are the prompt.
        max_drafts: most tokens the engine can verify for this row.
    """

    request_id: str
    child: int
    tokens: np.ndarray[Any, Any]
    prompt_len: int
    max_drafts: int


@attrs.frozen(kw_only=True)
class Draft:
    """A guess: the next tokens in order, each with an optional confidence.

    ``confidence[j]`` estimates the probability that token j is accepted given that all before it were.
    """

    tokens: Sequence[int]
    confidence: Sequence[float] | None = None


@attrs.frozen(kw_only=True)
class Verified:
    """What became of a draft: ``accepted`` of ``proposed`` tokens, and the tokens that were committed.

    ``rule`` decided it. ``confidence`` is what the drafter said of the proposed ones, None if it said nothing, and
    ``notes`` what it noted of them.
    """

    request_id: str
    child: int
    proposed: int
    accepted: int
    tokens: Sequence[int]
    rule: Literal["exact", "rejection"] = "exact"
    confidence: Sequence[float] | None = None
    notes: Sequence[float] | None = None


class Drafter(Protocol):
    """Guesses tokens on the host. Called from the engine's thread, between steps.

    A drafter that raises, or proposes an id outside the vocabulary, costs its drafts of that step and a log
    line; the requests go on without.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Draft]:
        """One draft per row, in order; an empty one is fine. Longer drafts than ``max_drafts`` are cut."""
        ...

    def verified(self, results: Sequence[Verified]) -> None:
        """Told after each verified step, for rows that had drafts."""
        ...

    def forget(self, request_id: str, child: int) -> None:
        """The completion ended or was preempted: drop what is kept for it."""
        ...


@attrs.frozen(kw_only=True)
class Proposal:
    """Device-resident drafts of R requests.

    Attributes:
        tokens: ``[R, n]`` int64, n up to the step's depth. A request's draft ends at the first id that is no token.
        confidence: ``[R, n]`` float32 probabilities that draft j is accepted if all before it are, or None. Of rows
            under the rejection rule it may depend on drafts before j but not on draft j, since it decides what is
            verified.
        scores: ``[R, n, V]`` float32 whose softmax the tokens were drawn from, or None: each was certain (one-hot).
            Only rows under the rejection rule are read.
        learned: the confidence is how often drafts were accepted lately: verifying alone tells whether it changed.
        notes: ``[R, n]`` float32, a number of each draft that the drafter wants to see again in ``Verified``, or None.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    learned: bool = False
    notes: torch.Tensor | None = None


@attrs.frozen(kw_only=True)
class DraftStep:
    """One step as a device drafter sees it: the target has run, its tokens stand in the history.

    Attributes:
        state: parameters and history of the running requests, by slot.
        slots: ``[R]`` int64, of the requests to draft for.
        anchors: ``[R]`` int64, position of the newest token of each. host_anchors: the same on the host.
        depth: most drafts wanted.
        rows: the T rows that the target ran, in the module's own caches; None without a module. Rows of rejected drafts
            are among them: what is written for these is rewritten before it is read.
        places: module's cache group -> ``[T]`` int64 on the host: block times block size plus offset, where each row
            lies; in block 0 if nobody can ever read it.
        tables: module's cache group -> ``[R, B]`` int32 on the host, the block tables of the requests to draft for.
        readable: ``(group, blocks [N])`` -> ``[N]`` bool on the host: whether anybody may ever read what lies in these
            blocks now, a running request or one that finds it as a prefix. What is no longer readable stays so until
            all of it is written again.
        next_tokens: gives ``[T]`` int64, the token that follows each row (anything after a rejected one).
        taps: what leaves the target's layers named in ``DraftModuleSpec.taps``, or what the module keeps of it, each
            ``[T, ...]``.
        last_rows: ``[R]`` int64, the row whose token is the anchor.
        reread: ``counts [R]`` on the host -> batches, to be run in this order, of the last ``counts[r]`` rows before
            each anchor, with their tokens, in the module's caches; none has more rows than a step may have.
        block: ``(tokens [R, n], offset)`` -> a batch of n rows a request in the module's caches, the first at
            ``anchor + offset``.
        choose: ``(scores [R, V] float32, j)`` -> ``(tokens [R], scores [R, V] | None)``: draws draft j as its request
            samples (temperature, filters, penalties), with the target's own noise under the exact rule; the scores are
            what to give back in ``Proposal.scores``, None while no row of the step needs them. j counts from 0. Scores
            narrower than the target's logits say nothing of the ids beyond, which are then not drafted.
    """

    state: SamplingState
    slots: torch.Tensor
    anchors: torch.Tensor
    host_anchors: np.ndarray[Any, Any]
    depth: int
    rows: ModelBatch | None
    places: Mapping[str, np.ndarray[Any, Any]]
    tables: Mapping[str, np.ndarray[Any, Any]]
    readable: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    next_tokens: Callable[[], torch.Tensor]
    taps: Sequence[torch.Tensor]
    last_rows: torch.Tensor
    reread: Callable[[np.ndarray[Any, Any]], Iterator[ModelBatch]]
    block: Callable[[torch.Tensor, int], ModelBatch]
    choose: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]


@attrs.frozen(kw_only=True)
class DrafterContext:
    """What a device drafter starts with.

    Attributes:
        module: the draft module (a :class:`Model`) that the engine built, or None.
        target: path of the target's checkpoint.
        max_draft_tokens: drafts verified at most. vocab_size: ids at or above it are no tokens.
        temperatures: of the confidence by draft position, the last for all further ones; None where the user set none.
        rule: ``exact`` when no request is verified by rejection.
    """

    module: Any
    target: str
    max_draft_tokens: int
    vocab_size: int
    temperatures: Sequence[float] | None
    rule: Literal["exact", "rejection"]


class DeviceDrafter(Protocol):
    """Guesses tokens on the device, inside the step's closure. Keeps nothing between steps but in its caches.

    What it raises costs the drafts of that step and a log line.
    """

    def start(self, context: DrafterContext) -> None:
        """Once, after weights are loaded."""
        ...

    def absorb(self, step: DraftStep) -> None:
        """Keep what later drafts need of the rows that the target ran.

        Called for every step, in their order. Those that draft for nobody, R = 0, may be shown some steps later and
        several as one, whose rows are those of each in turn, so that a request may be there more than once; but before
        the next that drafts and before another request has one of their slots.
        """
        ...

    def propose(self, step: DraftStep) -> Proposal:
        """Drafts for the R requests, after :meth:`absorb` of the same step."""
        ...

    def verified(self, results: Sequence[Verified]) -> None:
        """Told on the host after each verified step, for rows that had drafts."""
        ...


@attrs.frozen(kw_only=True)
class DrafterNeeds:
    """What a drafter needs, decided before weights load.

    Attributes:
        reads: ``tokens``: on the host (:class:`Drafter`). ``history``: the device's token history. ``module``: also a
            draft module with caches of its own and what leaves the target's layers (``ModelSpec.draft``).
        architecture: of the module, among those that plugins declare in ``deepinfer_models``.
        checkpoint: where the module's weights are; None: beside the target's own.
        setting: of the user's, which names ``checkpoint``; names: what it may be besides a path. For messages.
    """

    reads: Reads = "tokens"
    architecture: str = ""
    checkpoint: str | None = None
    setting: str = ""
    names: Sequence[str] = ()

    def __attrs_post_init__(self) -> None:
        if (self.reads == "module") != bool(self.architecture or self.checkpoint):
            raise ValueError("an architecture or checkpoint goes with reads='module' and only with it")


@attrs.frozen(kw_only=True)
class VerifyCost:
    """Measured costs of one step, for a schedule.

    Attributes:
        rows: rows the target ran. requests: how many requests had rows.
        target_seconds: its forward pass and sampling. draft_seconds: absorbing and proposing; ``drafted`` requests.
        decode: True when all rows belong to decoding requests.
        absorb_seconds: of ``draft_seconds``, absorbing alone.
        chances: ``[drafted, n]`` float64 survival of the drafts that this step made, None where it made none.
        learned: these are rates of earlier verdicts (:attr:`Proposal.learned`).
        steps: itself and how many before it that were not measured: of those without drafts only some are.
    """

    rows: int
    requests: int
    target_seconds: float
    draft_seconds: float
    drafted: int
    decode: bool
    absorb_seconds: float = 0.0
    chances: np.ndarray[Any, Any] | None = None
    learned: bool = False
    steps: int = 1


class MeasureStep(Protocol):
    """Times a step of the target before there are requests."""

    def __call__(self, rows: int, each: int = 1) -> float:
        """Seconds of a step with ``rows`` decode rows, ``each`` of every request, the last with what is left over.

        Raises:
            MemoryError: the device has no room for such a step.
        """
        ...


class DraftSchedule(Protocol):
    """Decides how many drafts are verified. Host code over arrays; the engine clips what it answers.

    ``survival [R, n]`` float64 holds for each request the probability that its first j+1 drafts are all accepted, 0
    where it has none; ``caps [R]`` the most drafts that can be verified.
    """

    def start(self, measure: MeasureStep, rows: Sequence[int], key: Mapping[str, str]) -> str:
        """Once, after weights are loaded.

        Args:
            measure: seconds of a step of the target.
            rows: step sizes worth measuring. key: what the measurement holds for (model, device, versions).

        Returns:
            Where the cost table came from, for ``explain``.
        """
        ...

    def budget(self, survival: np.ndarray[Any, Any], caps: np.ndarray[Any, Any], rows: int, *, delayed: bool) -> int:
        """Drafts to verify in the next step, over all requests.

        Args:
            rows: rows the step has without drafts.
            delayed: the choice may use all of the survival: of requests under the rejection rule it is that of the
                drafts before those that will be verified; the exact rule gives the same tokens whatever is verified.
                Otherwise it is that of these very drafts, and the choice must stop at the first that does not pay, or
                it would depend on what it decides about.
        """
        ...

    def drafts(self, requests: int, fresh: int) -> int:
        """How many of the requests this step shall draft for: all, none, or a few to find out whether that pays.

        Among the requests are those within their prompts, or about to enter: they will be there in the next step. The
        engine takes those that can be drafted for whose last turn is longest ago. ``fresh`` of them have sampled fewer
        than :data:`FRESH_TOKENS` tokens: how a text begins is harder to foretell than what follows.
        """
        ...

    def allocate(self, survival: np.ndarray[Any, Any], caps: np.ndarray[Any, Any], total: int) -> np.ndarray[Any, Any]:
        """``total`` drafts over the requests, from their newest survival: ``[R]`` counts, each at most its cap."""
        ...

    def observe(self, cost: VerifyCost) -> None:
        """What a step cost, told after it was committed."""
        ...


@attrs.frozen(kw_only=True)
class DrafterInfo:
    """Declared by ``deepinfer_speculation``: a drafter users name in ``speculation.method``.

    Attributes:
        factory: called with the plugin's settings (or None), returns a :class:`Drafter` or :class:`DeviceDrafter`.
        needs: called with the settings and the target's config.json, returns :class:`DrafterNeeds`; None: it reads
            tokens on the host.
        schedule: called with the settings, returns the :class:`DraftSchedule` of ``speculation.schedule =
            "confidence"``; None: this drafter has none.
    """

    name: str
    help: str
    factory: LazyRef
    needs: LazyRef | None = None
    schedule: LazyRef | None = None
