"""Takes the results of a step back to the host: tokens, stops, log-probabilities, cache publication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import Verified
from deepinfer_core.tokenizer import Tokenizer

from .host_logprobs import HostLogprobs
from .host_result import HostResult
from .launched_step import LaunchedStep, ReadyStep, StepResult
from .outputs import FinishReason, Logprob, RequestError, StreamDelta, TokenLogprobs
from .planner import Planner
from .request import Request, Sequence
from .settle import publish, release_finished
from .slot_needs import SlotNeeds
from .speculation import Speculator, accepted_drafts
from .step_plan import StepPlan

Array = np.ndarray[Any, Any]


@attrs.define
class Committed:
    """What a commit brought: requests that ended, streams whose outbox is no longer empty, output tokens."""

    finished: list[Request] = attrs.field(factory=list)
    streamed: list[Request] = attrs.field(factory=list)
    output_tokens: int = 0

    def post(self, request: Request, delta: StreamDelta) -> None:
        if not request.outbox:
            self.streamed.append(request)
        request.outbox.append(delta)


@attrs.frozen
class _Drafted:
    """Drafts of one completion in a step; ``first`` is the position of the first token drawn in it."""

    sequence: Sequence
    first: int
    proposed: int
    accepted: int
    by_rejection: bool
    confidence: Array | None
    notes: Array | None


class Committer:
    """Applies step results. The only place where a token becomes part of a request."""

    def __init__(
        self,
        *,
        planner: Planner,
        needs: SlotNeeds,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        speculator: Speculator | None = None,
    ) -> None:
        self.planner = planner
        self.slots = planner.slots
        self.needs = needs
        self.tokenizer = tokenizer
        self.clock = clock
        self.speculator = speculator
        if speculator is not None:
            planner.on_preempted = speculator.forget

    def commit(self, step: LaunchedStep, result: HostResult) -> Committed:
        """Apply one step's result, in launch order."""
        out, ready = Committed(), result.device.ready
        plan, tokens, proposed = ready.plan, result.tokens, result.device.proposed
        self.slots.in_flight[plan.slots] -= 1
        for rows, logprobs in zip(ready.inputs.prompts, result.prompts, strict=True):
            self._add_prompt_logprobs(rows.request, logprobs, rows.targets, rows.k)
        if tokens is None:
            publish(self.planner, plan.slots, plan.starts + plan.counts)
        else:
            kept, computed, drafted = self._accept(step, plan, tokens)
            broken = ready.inputs.sample_slots[tokens < 0]
            if len(broken):
                computed[np.isin(plan.slots, broken)] = 0  # a broken step's rows are served to nobody
            self._record(ready, tokens, kept, out)
            publish(self.planner, plan.slots, computed)
            self._look(ready, result, tokens, kept, out)
            self._tell_drafter(drafted)
        if self.planner.drafting is not None and proposed is not None:
            self.planner.drafting.known(proposed.slots, proposed.chances)
        release_finished(self.planner, plan.slots)
        return out

    def lose(self, steps: list[LaunchedStep]) -> None:
        """Steps that ran out of memory: their requests go back to waiting with the tokens they have."""
        for step in steps:
            self.slots.in_flight[step.plan.slots] -= 1
            release_finished(self.planner, step.plan.slots)
            for rows in step.prompts:
                rows.request.prompt_rows_planned = min(rows.request.prompt_rows_planned, rows.first_position)
        for step in steps:
            for slot in step.plan.slots.tolist():
                sequence = self.slots.sequence[slot]
                if sequence is not None:
                    self.planner.preemption.preempt(slot)

    def fail(self, step: LaunchedStep, error: RequestError) -> Committed:
        """The whole step was lost: end its requests."""
        out = Committed()
        self.slots.in_flight[step.plan.slots] -= 1
        for slot in step.plan.slots.tolist():
            sequence = self.slots.sequence[slot]
            if sequence is not None and sequence.status == "running":
                self.finish(sequence, "error", out, error=error)
        release_finished(self.planner, step.plan.slots)
        return out

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        out: Committed,
        *,
        stop_reason: str | int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """End a sequence, wherever it is. Its slot and blocks are freed when nothing of it is in flight."""
        tail = ""
        if sequence.detokenizer is not None:
            tail = sequence.detokenizer.finish()
            if sequence.detokenizer.stopped is not None and reason in ("length", "stop"):
                reason, stop_reason = "stop", sequence.detokenizer.stopped
                self._trim(sequence, sequence.detokenizer.stop_token_count)
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        request = sequence.request
        if request.streams:
            ids = self._unstreamed(sequence)
            out.post(request, StreamDelta(request.request_id, sequence.child, tail, ids, reason, error))
        tokens = self.slots.output_len(sequence)
        if sequence.slot >= 0 and self.slots.in_flight[sequence.slot]:
            self.planner.stop_scheduling(sequence)
        else:
            self.planner.remove(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        self.planner.tell("aborted" if reason == "abort" else "finished", sequence, tokens)
        if request.finished:
            request.metrics.finished = self.clock()
            self.planner.observer.finished(request)
            out.finished.append(request)

    # ---- tokens

    def _accept(self, step: LaunchedStep, plan: StepPlan, tokens: Array) -> tuple[Array, Array, list[_Drafted]]:
        """Which sampled rows count, how far each request's cache is now valid, and how good the drafts were.

        ``plan`` is the step's own with its drafts known; the slot table moves back by what was planned in vain, which
        steps launched meanwhile have counted on too.
        """
        table = self.slots
        kept, computed = np.ones(len(tokens), bool), plan.starts + plan.counts
        if not plan.drafts and (self.speculator is None or plan is step.plan):
            return kept, computed, []
        if self.speculator is not None:
            self.speculator.hold()
        planned = step.plan.samples - plan.samples  # drafts that were planned and did not come
        if not plan.drafts and not planned.any():
            return kept, computed, []
        accepted, drafted = accepted_drafts(plan, tokens), []
        ends = np.cumsum(plan.samples)
        for request, slot in enumerate(plan.slots.tolist()):
            drafts = plan.drafts.get(slot, ())
            cap = len(drafts) + int(planned[request])
            if cap == 0:
                continue
            good = int(accepted[request])
            kept[ends[request] - len(drafts) + good : ends[request]] = False
            computed[request] = plan.starts[request] + good + 1
            table.length[slot] -= cap - good
            table.computed[slot] -= cap - good
            table.slack[slot] -= cap
            self.planner.cache.shrink(slot, int(table.computed[slot]))
            sequence = table.sequence[slot]
            if sequence is None or sequence.status != "running" or len(drafts) == 0:
                continue  # nothing to judge; or it was aborted meanwhile, and the drafter told so
            if slot in plan.forced:
                sequence.request.metrics.forced_tokens += good
                continue
            sequence.request.metrics.proposed_drafts += len(drafts)
            sequence.request.metrics.accepted_drafts += good
            rejects = plan.rejects is not None and bool(plan.rejects[request])
            first, said = int(plan.starts[request]) + 1, (plan.confidence.get(slot), plan.notes.get(slot))
            drafted.append(_Drafted(sequence, first, len(drafts), good, rejects, *said))
        return kept, computed, drafted

    def _tell_drafter(self, drafted: list[_Drafted]) -> None:
        """What became of the drafts, told once it is known where a completion ended."""
        if self.speculator is None:
            return
        self.speculator.verified(
            [
                Verified(
                    request_id=d.sequence.request.request_id,
                    child=d.sequence.child,
                    proposed=d.proposed,
                    accepted=d.accepted,
                    tokens=self._known(d.sequence)[d.first :].tolist(),
                    rule="rejection" if d.by_rejection else "exact",
                    confidence=None if d.confidence is None else d.confidence.tolist(),
                    notes=None if d.notes is None else d.notes.tolist(),
                )
                for d in drafted
            ]
        )

    def _record(self, step: ReadyStep, tokens: Array, kept: Array, out: Committed) -> None:
        """Tokens become known to the host."""
        table, slots, positions = self.slots, step.inputs.sample_slots, step.inputs.sample_positions
        drawn = kept & (tokens >= 0) & ~table.finished[slots]
        table.tokens[slots[drawn], positions[drawn]] = tokens[drawn]
        table.committed[slots[drawn]] = positions[drawn] + 1  # ascending within a slot: the last one stays
        out.output_tokens += int(drawn.sum())

    def _look(self, step: ReadyStep, result: HostResult, tokens: Array, kept: Array, out: Committed) -> None:
        """Go through the rows that may end something or that somebody watches, in token order."""
        table, slots, positions = self.slots, step.inputs.sample_slots, step.inputs.sample_positions
        stops = (table.stop_ids[slots, : table.stop_width] == tokens[:, None]).any(axis=1) & (
            positions + 1 >= table.min_end[slots]
        )
        full = positions + 1 >= table.max_len[slots]
        first = positions == table.prompt_len[slots]
        live = kept & ~table.finished[slots]
        rows = np.nonzero(live & (stops | full | first | (tokens < 0) | table.needs_host[slots]))[0].tolist()
        if not rows:
            return
        owners = [table.sequence[slot] for slot in slots[rows].tolist()]
        looked = zip(rows, owners, *(a[rows].tolist() for a in (tokens, positions, stops, full, first)), strict=True)
        for row, sequence, token, position, stop, at_limit, is_first in looked:
            assert sequence is not None
            if sequence.status != "running":
                continue  # ended by a token before this one in the same step
            if is_first and token >= 0:
                self.planner.observer.first_token(sequence)
            after = 0
            if step.plan.drafts:  # should this token end it, those after it never were
                slot, known = sequence.slot, position + (token >= 0)
                after = int(table.committed[slot]) - known
                table.committed[slot] = known
            self._add_token(sequence, row, token, stop, at_limit, result, out)
            if after and sequence.status == "running":
                table.committed[sequence.slot] += after
            else:
                out.output_tokens -= after

    def _add_token(
        self, sequence: Sequence, row: int, token: int, stops: bool, full: bool, result: HostResult, out: Committed
    ) -> None:
        if token < 0:
            self.finish(sequence, "error", out, error=_why_no_token(result.device, row))
            return
        request = sequence.request
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._entries(*result.logprobs[row], token, self.needs.logprobs_of(sequence.slot)))
        delta, stopped = "", None
        if sequence.detokenizer is not None:
            delta = sequence.detokenizer.push((token,))
            stopped = sequence.detokenizer.stopped
        if request.streams:
            # Ids wait while text does: should it turn out to hold a stop string, they may never have been.
            open_match = sequence.detokenizer is not None and (sequence.detokenizer.holds_back or stopped is not None)
            ids = [] if open_match else self._unstreamed(sequence, token)
            if delta or ids:
                out.post(request, StreamDelta(request.request_id, sequence.child, delta, ids))
        failed = None if sequence.constraint is None else sequence.constraint.advance(token)
        if failed is not None:
            self.finish(sequence, "error", out, error=failed)
        elif stops:
            self.finish(sequence, "stop", out, stop_reason=None if token in request.eos_token_ids else token)
        elif stopped is not None:
            self.finish(sequence, "stop", out, stop_reason=stopped)
        elif sequence.constraint is not None and sequence.constraint.finished:
            self.finish(sequence, "stop", out)
        elif full:
            self.finish(sequence, "length", out)

    def _unstreamed(self, sequence: Sequence, newest: int | None = None) -> list[int]:
        """Output ids that no delta has carried yet; from now on they count as streamed.

        ``newest`` is the last of them where that is known: most often it is the only one.
        """
        if newest is not None and self.slots.committed[sequence.slot] == sequence.prompt_len + sequence.streamed + 1:
            sequence.streamed += 1
            return [newest]
        ids: list[int] = self._known(sequence)[sequence.prompt_len + sequence.streamed :].tolist()
        sequence.streamed += len(ids)
        return ids

    def _known(self, sequence: Sequence) -> Array:
        """Tokens the host knows, prompt first."""
        slot = sequence.slot
        return sequence.tokens if slot < 0 else self.slots.tokens[slot, : self.slots.committed[slot]]

    def _trim(self, sequence: Sequence, output_tokens: int) -> None:
        """Drop tokens after the one that completed the stop string; a longer match may have been possible."""
        length = sequence.prompt_len + output_tokens
        if sequence.slot >= 0:
            self.slots.committed[sequence.slot] = min(length, int(self.slots.committed[sequence.slot]))
        else:
            sequence.tokens = sequence.tokens[:length]
        if sequence.logprobs is not None:
            del sequence.logprobs[output_tokens:]

    # ---- log-probabilities

    def _entries(self, result: HostLogprobs, row: int, token: int, k: int) -> TokenLogprobs:
        """The k best tokens and the chosen one, best first."""
        entries = {
            int(i): Logprob(float(v), rank + 1, self._text(int(i)))
            for rank, (i, v) in enumerate(
                zip(result.top_ids[row, :k].tolist(), result.top[row, :k].tolist(), strict=True)
            )
        }
        if token not in entries:
            entries[token] = Logprob(float(result.chosen[row]), int(result.rank[row]), self._text(token))
        return entries

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.id_to_bytes(token).decode(errors="replace")

    def _add_prompt_logprobs(self, request: Request, result: HostLogprobs, targets: Array, k: int) -> None:
        assert request.prompt_logprobs is not None
        for row, token in enumerate(targets.tolist()):
            request.prompt_logprobs.append(self._entries(result, row, token, k))


def _why_no_token(result: StepResult, row: int) -> RequestError:
    assert result.sampled is not None
    if result.masks is not None and row in result.masks.errors:
        return RequestError("constraint", result.masks.errors[row])
    if row in result.sampled.errors:
        return RequestError("internal", result.sampled.errors[row])
    highest = float(result.sampled.logits[row].max())  # NaN if there is one
    if np.isnan(highest) or highest == float("inf"):
        return RequestError("nan_logits", "the model produced NaN or infinite logits for this request")
    return RequestError("no_allowed_token", "masks and bans left no token that could be generated")
