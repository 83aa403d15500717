"""The request loop: plan, launch, commit; optionally one step ahead."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import structlog

from deepinfer_core.api import InvalidRequestError

from .commit import Committed, Committer
from .constraint import Constraints
from .failed_memory import release_memory
from .host_result import HostResult
from .launched_step import LaunchedStep
from .outputs import FinishReason, RequestError
from .planner import Planner
from .request import Request
from .runner import Runner
from .speculation import Speculator
from .step_plan import StepPlan

log = structlog.get_logger("deepinfer.engine")

IDLE_SECONDS = 0.01
"""How long a loop with nothing to run waits for a grammar before it looks at its requests again."""


class EngineCore:
    """One model on one device, and its live requests.

    ``ahead`` is how many steps may be launched before the host has seen the tokens of the last: 0 is
    synchronous, 1 overlaps the host's work with the device's. The tokens are the same.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        runner: Runner,
        committer: Committer,
        ahead: int,
        speculator: Speculator | None = None,
        constraints: Constraints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.planner = planner
        self.runner = runner
        self.committer = committer
        self.ahead = ahead
        self.speculator = speculator
        self.constraints = constraints
        self.clock = clock
        self.observer = planner.observer
        self.requests: dict[str, Request] = {}
        self._launched: deque[LaunchedStep] = deque()
        self._expiry: list[tuple[float, str]] = []
        self._forced: frozenset[int] = frozenset()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests) or bool(self._launched)

    def check_ids(self, requests: Iterable[Request]) -> None:
        """Refuse ids that are live or repeated, before anything is queued."""
        seen = set(self.requests)
        for request in requests:
            if request.request_id in seen:
                raise InvalidRequestError(f"request_id={request.request_id!r}: a request with this id is running")
            seen.add(request.request_id)

    def add(self, requests: Iterable[Request]) -> Committed:
        """Queue validated requests, all or none. Those the policy refuses come back as finished."""
        requests = list(requests)
        self.check_ids(requests)
        out = Committed()
        for request in requests:
            self.requests[request.request_id] = request
            held = self.constraints is not None and request.params.structured_outputs is not None
            for sequence in request.sequences:
                self.planner.enqueue(sequence, held=held)
            answer = self.planner.guard.admit(request)
            if not answer.accepted:
                error = RequestError("rejected", f"the scheduling policy refused the request: {answer.reason}")
                self._end(request, "error", out, error)
                continue
            if request.expires is not None:
                self._watch(request.expires, request.request_id)
            if self.constraints is not None and self.constraints.begin(request):
                for sequence in request.sequences:
                    self.observer.waits(sequence, "its grammar, which is being compiled")
                self._release_compiled(out)
        return self._collect(out)

    def abort(self, request_ids: Iterable[str]) -> Committed:
        """End requests with ``abort``. Unknown and finished ids are ignored."""
        out = Committed()
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, "abort", out)
        return self._collect(out)

    def step(self) -> Committed:
        """Launch what can run and commit what is due. Returns what became known; empty when nothing did."""
        expired = self._expire()
        self._release_compiled(expired)
        must_commit = (self.planner.needs_drain and bool(self._launched)) or self._commits_first
        done = self._commit_oldest() if must_commit else self._launch_and_commit()
        done.finished[:0] = expired.finished
        done.streamed[:0] = expired.streamed
        return self._collect(done)

    def drain(self) -> Committed:
        """Commit everything that was launched."""
        out = Committed()
        while self._launched:
            part = self._commit_oldest()
            out.finished += part.finished
            out.streamed += part.streamed
            out.output_tokens += part.output_tokens
        return self._collect(out)

    def close(self) -> None:
        self.abort(list(self.requests))
        self.drain()
        self.runner.close()
        if self.constraints is not None:
            self.constraints.close()

    def _launch_and_commit(self) -> Committed:
        started = self.clock()
        plan = self.planner.plan(self._drafts())
        if plan is not None:
            planned = self.clock()
            plan.forced = self._forced & plan.drafts.keys()
            self._launched.append(self._launch(plan))
            self.observer.launched(plan, started, planned)
        elif not self._launched and self.constraints is not None and self.constraints.waiting:
            self.constraints.wait(IDLE_SECONDS)
        if len(self._launched) > (self.ahead if plan is not None else 0):
            return self._commit_oldest()
        return Committed()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Rows that follow a grammar are sampled after the commit of every step before theirs."""
        constraints, slots = self.constraints, self.planner.slots
        if constraints is None or not constraints.constrains(plan, slots):
            return self.runner.launch(plan)
        if self._launched and self.runner.drafting is None:
            return self.runner.launch(plan, hold=True)
        return self.runner.launch(plan, lambda known: constraints.masks(known, slots))

    @property
    def _commits_first(self) -> bool:
        """Drafts of a device drafter are known inside the step; masks need them, and the commit before it."""
        constraints = self.constraints
        if self.runner.drafting is None or constraints is None or not self._launched:
            return False
        return constraints.any_running(self.planner.slots)

    def _sample_held(self, step: LaunchedStep) -> None:
        """All steps before this one are committed: sample it, if it waited for that."""
        if step.held is not None and self.constraints is not None:
            step.sample(self.constraints.masks(step.plan, self.planner.slots))

    def _release_compiled(self, out: Committed) -> None:
        """Requests whose grammar is compiled join the queue, or end if it could not be."""
        for request, error in self.constraints.ready() if self.constraints is not None else ():
            if error is not None:
                self._end(request, "error", out, error)
                continue
            for sequence in request.sequences:
                sequence.waiting_for = "queued"
                self.planner.release(sequence)

    def _watch(self, expires: float, request_id: str) -> None:
        """Remember a time limit, and forget those of requests that ended, once these are the larger part."""
        heapq.heappush(self._expiry, (expires, request_id))
        if len(self._expiry) > 2 * len(self.requests) + 16:
            self._expiry = [entry for entry in self._expiry if entry[1] in self.requests]
            heapq.heapify(self._expiry)

    def _expire(self) -> Committed:
        """End requests whose own time limit passed."""
        out = Committed()
        while self._expiry and self._expiry[0][0] <= self.clock():
            _, request_id = heapq.heappop(self._expiry)
            request = self.requests.get(request_id)
            if request is not None and request.expires is not None and request.expires <= self.clock():
                self._end(request, "error", out, RequestError("timeout", "the request's time limit passed"))
        return out

    def _end(self, request: Request, reason: FinishReason, out: Committed, error: RequestError | None = None) -> None:
        if self.constraints is not None:
            self.constraints.forget(request)
        for sequence in request.sequences:
            if sequence.status != "finished":
                self.committer.finish(sequence, reason, out, error=error)

    def _drafts(self) -> dict[int, np.ndarray[Any, Any]]:
        """Tokens that grammars leave no choice about come first; a drafter guesses for the other rows."""
        if self.speculator is None and self.constraints is None:
            return {}
        table, slots = self.planner.slots, self.planner.decoding_slots()
        forced = {} if self.constraints is None else self.constraints.forced(slots, table)
        self._forced = frozenset(forced)
        if self.speculator is None:
            return forced
        if forced:
            slots = slots[~np.isin(slots, list(forced))]
        guesses = self.speculator.propose(slots, table)
        return {**forced, **(guesses if self.constraints is None else self.constraints.legal(guesses, table))}

    def _commit_oldest(self) -> Committed:
        step = self._launched.popleft()
        self._sample_held(step)
        try:
            return self._commit(step)
        finally:
            if self._launched:
                self._sample_held(self._launched[0])

    def _commit(self, step: LaunchedStep) -> Committed:
        self.observer.wait_starts(step.plan, step.event)
        try:
            result = step.event.wait()
            self.observer.wait_ends()
            found = HostResult.fetch(self.runner.device, result)
        except BaseException as error:
            failed = self._step_failed(step, error)
            if isinstance(error, Exception):
                return failed
            self._collect(failed)
            raise  # an interrupt: the step's requests ended, the engine is clean
        self.planner.step_succeeded()
        out = self.committer.commit(step, found)
        timing = self.observer.committed(out.output_tokens)
        self.planner.step_cost.record(len(result.ready.inputs.positions), timing.seconds)
        if self.planner.drafting is not None and result.cost is not None:
            self.planner.drafting.observe(result.cost)
        return out

    def _step_failed(self, step: LaunchedStep, error: BaseException) -> Committed:
        self.observer.step_failed()
        if self.runner.device.is_out_of_memory(error):
            release_memory(error)
            if self.planner.back_off():
                log.warning("out of memory: the step is tried again with fewer tokens", tokens=step.plan.num_tokens)
                lost = [step, *self._launched]
                self._launched.clear()
                for each in lost:
                    _wait_quietly(each)
                self.committer.lose(lost)
                return Committed()
            return self.committer.fail(step, RequestError("out_of_memory", str(error)))
        log.error("step failed", step=step.plan.number, requests=len(step.plan.slots), exc_info=error)
        return self.committer.fail(step, RequestError("internal", f"{type(error).__name__}: {error}"))

    def _collect(self, out: Committed) -> Committed:
        for request in out.finished:
            self.requests.pop(request.request_id, None)
        self.observer.flush()
        return out


def _wait_quietly(step: LaunchedStep) -> None:
    """Let a step that is lost anyway finish, so that nothing of it runs while its blocks change hands."""
    try:
        for masks in step.masks:
            masks.wait()
        step.event.wait()
    except Exception as error:
        log.debug("the step failed", step=step.plan.number, error=str(error))
        release_memory(error)
