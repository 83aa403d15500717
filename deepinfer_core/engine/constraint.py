"""Completions that follow a grammar: from compilation to the last token.

A request waits until its grammar is compiled. From then on each of its completions has a state that knows the
committed tokens and no others, which makes the rest follow: a step that is lost, a preemption or a rejected draft
never has to be undone here. Masks are made from it when the step before is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import structlog

from deepinfer_core.api import ConstraintCompiler, ConstraintSpec, ConstraintState, MaskJob
from deepinfer_core.config import StructuredOutputsConfig

from .constraint_compile import CompileJob, CompilePool
from .constraint_masks import MaskFiller, StepMasks
from .outputs import RequestError
from .request import Request
from .slot_table import SlotTable
from .step_plan import StepPlan

log = structlog.get_logger("deepinfer.constraints")

Array = np.ndarray[Any, Any]
Drafts = dict[int, Array]


@attrs.define(eq=False)
class Constrained:
    """One completion's grammar. ``finished``: it is complete, and nothing can follow."""

    state: ConstraintState
    ignore_eos: bool
    finished: bool = False
    _forced: tuple[int, ...] | None = None

    def advance(self, token: int) -> RequestError | None:
        """A token was committed. Returns why the completion cannot go on, if it cannot."""
        self._forced = None
        try:
            taken = self.state.accept((token,))
            self.finished = bool(self.state.is_finished)
        except BaseException as error:  # native code raises what it likes
            return RequestError("constraint", f"the grammar raised {type(error).__name__}: {error}")
        return None if taken == 1 else RequestError("constraint", f"token {token} was drawn against the grammar")

    def forced(self, limit: int) -> tuple[int, ...]:
        """Tokens that must follow what is committed. Asked once per token; the answer is kept."""
        if self._forced is None:
            try:
                self._forced = tuple(self.state.forced(limit)) if limit else ()
            except BaseException:
                log.exception("grammar raised in forced")
                self._forced = ()
        return self._forced

    def legal(self, tokens: Array) -> Array:
        """``tokens`` up to the first that the grammar forbids."""
        try:
            taken = self.state.accept(tokens.tolist())
            self.state.rollback(taken)
        except BaseException:
            log.exception("grammar raised while it looked at drafts")
            return tokens[:0]
        return tokens[:taken]


class Constraints:
    """All grammars of one engine. Called from the engine's thread; :meth:`check` from any.

    ``jump_forward``: most tokens that a step takes because nothing else may follow; 0 for none.
    """

    def __init__(
        self,
        make: Callable[[], ConstraintCompiler],
        *,
        width: int,
        token_limit: int,
        eos_token_ids: Sequence[int],
        config: StructuredOutputsConfig,
        jump_forward: int,
        clock: Callable[[], float],
    ) -> None:
        self.token_limit = token_limit
        self.clock = clock
        self.jump_forward = jump_forward
        self.pool = CompilePool(
            self.compiler,
            threads=config.compile_threads,
            cache_bytes=config.cache_bytes,
            grammar_bytes=config.compiled_bytes,
        )
        self._seconds = config.compile_seconds
        self._filler = MaskFiller(self.compiler, width=width, eos_token_ids=eos_token_ids)
        self._make = make
        self._made: ConstraintCompiler | None = None
        self._making = threading.Lock()
        self._compiling: dict[str, tuple[Request, CompileJob, float]] = {}

    def compiler(self) -> ConstraintCompiler:
        """The plugin's compiler, made when it is first needed."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def check(self, spec: ConstraintSpec) -> None:
        """Refuse what can be refused without compiling.

        Raises:
            InvalidRequestError: names what cannot be enforced.
        """
        self.compiler().check(spec)

    # ---- compiling

    @property
    def waiting(self) -> bool:
        return bool(self._compiling)

    def begin(self, request: Request) -> bool:
        """Have a request's grammar compiled. False when there is nothing to wait for: it has none."""
        spec = request.params.structured_outputs
        if spec is None:
            return False
        self._compiling[request.request_id] = (request, self.pool.submit(spec), self.clock() + self._seconds)
        return True

    def ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait no longer: their completions have states now, or there is an error."""
        out: list[tuple[Request, RequestError | None]] = []
        for request, job, deadline in list(self._compiling.values()):
            if job.done:
                out.append((request, self._start(request, job)))
            elif self.clock() >= deadline:
                self.pool.abandon(job)
                text = f"compiling took longer than structured_outputs.compile_seconds={self._seconds:g}"
                out.append((request, RequestError("constraint", text)))
        for request, _ in out:
            del self._compiling[request.request_id]
        return out

    def forget(self, request: Request) -> None:
        """A request ended before its grammar was compiled."""
        self._compiling.pop(request.request_id, None)

    def wait(self, seconds: float) -> None:
        """Sleep until a grammar is compiled, or for this many seconds."""
        if not any(job.done for _, job, _ in self._compiling.values()):
            self.pool.wait(seconds)

    def _start(self, request: Request, job: CompileJob) -> RequestError | None:
        spec = request.params.structured_outputs
        if job.compiled is None or spec is None:
            return RequestError("constraint", f"structured_outputs: {job.error}")
        try:
            for sequence in request.sequences:
                sequence.constraint = Constrained(job.compiled.start(spec), request.params.ignore_eos)
        except BaseException as error:  # native code raises what it likes
            return RequestError("constraint", f"structured_outputs: {error}")
        return None

    # ---- drafts

    def forced(self, slots: Array, table: SlotTable) -> Drafts:
        """Drafts that cannot be wrong, for slots that are one row short of their next token: slot -> tokens.

        With a step in flight, its token is the first of those that must follow, and the drafts begin after it.
        """
        found: Drafts = {}
        for slot in slots.tolist() if self.jump_forward else ():
            sequence = table.sequence[slot]
            if sequence is None or sequence.constraint is None:
                continue
            room = min(int(table.max_len[slot] - table.length[slot]) - 1, self.jump_forward)
            unseen = int(table.length[slot] - table.committed[slot])
            tokens = sequence.constraint.forced(self.jump_forward + 1)[unseen : unseen + room] if room > 0 else ()
            if tokens:
                found[slot] = np.array(tokens, np.int32)
        return found

    def legal(self, drafts: Mapping[int, Array], table: SlotTable) -> Drafts:
        """A drafter's guesses without what the grammars forbid, which could never be accepted."""
        found: Drafts = {}
        for slot, tokens in drafts.items():
            sequence = table.sequence[slot]
            if sequence is not None and sequence.constraint is not None:
                tokens = sequence.constraint.legal(tokens)
            if len(tokens):
                found[slot] = tokens
        return found

    # ---- masks

    def constrains(self, plan: StepPlan, table: SlotTable) -> bool:
        """True when some row that a step samples follows a grammar."""
        sampled = plan.slots[plan.samples > 0].tolist()
        return any((s := table.sequence[slot]) is not None and s.constraint is not None for slot in sampled)

    def any_running(self, table: SlotTable) -> bool:
        """True when some running completion follows a grammar."""
        return any((s := table.sequence[slot]) is not None and s.constraint is not None for slot in table.running)

    def masks(self, plan: StepPlan, table: SlotTable) -> StepMasks:
        """Begin to fill the masks of a step whose predecessors are all committed."""
        jobs, without_eos = [], []
        ends = np.cumsum(plan.samples)
        columns = zip(plan.slots.tolist(), plan.samples.tolist(), ends.tolist(), strict=True)
        for slot, samples, end in columns:
            sequence = table.sequence[slot]
            if not samples or sequence is None or sequence.constraint is None or sequence.status != "running":
                continue
            sequence.constraint.forced(self.jump_forward + 1)  # while no other thread reads the state
            drafts = plan.drafts.get(slot)
            job = MaskJob(sequence.constraint.state, end - samples, () if drafts is None else tuple(drafts.tolist()))
            jobs.append(job)
            if sequence.constraint.ignore_eos:
                without_eos.append(job)
        return self._filler.start(jobs, int(ends[-1]), without_eos=without_eos)

    def close(self) -> None:
        self.pool.close()
        self._filler.close()
        if self._made is not None:
            self._made.close()
