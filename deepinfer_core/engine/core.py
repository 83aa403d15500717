"""The request loop: plan, launch, commit; optionally one step ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import structlog

from deepinfer_core.api import InvalidRequestError

from .commit import Committed, Committer
from .outputs import RequestError
from .planner import Planner
from .request import Request
from .runner import LaunchedStep, Runner
from .speculation import Speculator

log = structlog.get_logger("deepinfer.engine")


class EngineCore:
    """One model on one device, and its live requests.

    ``ahead`` is how many steps may be launched before the host has seen the tokens of the last: 0 is
    synchronous, 1 overlaps the host's work with the device's. The tokens are the same. A drafter needs the last
    tokens on the host, so with one the loop is synchronous.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        runner: Runner,
        committer: Committer,
        ahead: int,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.planner = planner
        self.runner = runner
        self.committer = committer
        self.ahead = ahead
        self.speculator = speculator
        self.clock = clock
        self.requests: dict[str, Request] = {}
        self._launched: deque[LaunchedStep] = deque()

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
            for sequence in request.sequences:
                self.planner.enqueue(sequence)
            answer = self.planner.admit_request(request.sequences[0])
            if not answer.accepted:
                error = RequestError("rejected", f"the scheduling policy refused the request: {answer.reason}")
                for sequence in request.sequences:
                    self.committer.finish(sequence, "error", out, error=error)
        return self._collect(out)

    def abort(self, request_ids: Iterable[str]) -> Committed:
        """End requests with ``abort``. Unknown and finished ids are ignored."""
        out = Committed()
        for request_id in request_ids:
            request = self.requests.get(request_id)
            for sequence in request.sequences if request is not None else ():
                if sequence.status != "finished":
                    self.committer.finish(sequence, "abort", out)
        return self._collect(out)

    def step(self) -> Committed:
        """Launch what can run and commit what is due. Returns what became known; empty when nothing did."""
        if self.planner.needs_drain:
            return self._collect(self._commit_oldest()) if self._launched else self._launch_and_commit()
        return self._launch_and_commit()

    def drain(self) -> Committed:
        """Commit everything that was launched."""
        out = Committed()
        while self._launched:
            part = self._commit_oldest()
            out.finished += part.finished
            out.output_tokens += part.output_tokens
        return self._collect(out)

    def close(self) -> None:
        self.abort(list(self.requests))
        self.drain()
        self.runner.close()

    def _launch_and_commit(self) -> Committed:
        plan = self.planner.plan(self._drafts())
        if plan is not None:
            self._launched.append(self.runner.launch(plan))
        if len(self._launched) > (self.ahead if plan is not None else 0):
            return self._collect(self._commit_oldest())
        return Committed()

    def _drafts(self) -> dict[int, np.ndarray[Any, Any]]:
        if self.speculator is None:
            return {}
        return self.speculator.propose(self.planner.decoding_slots(), self.planner.slots)

    def _commit_oldest(self) -> Committed:
        step = self._launched.popleft()
        try:
            result = step.event.wait()
        except Exception as error:
            log.exception("step failed", step=step.plan.number, requests=len(step.plan.slots))
            return self.committer.fail(step, RequestError("internal", f"{type(error).__name__}: {error}"))
        return self.committer.commit(step, result)

    def _collect(self, out: Committed) -> Committed:
        for request in out.finished:
            self.requests.pop(request.request_id, None)
        return out
