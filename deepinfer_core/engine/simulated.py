"""An engine without a model: the planner and all it uses, a virtual clock, and tokens that are only counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from deepinfer_core.api import CacheGroupSpec, EventKind, Policy
from deepinfer_core.api.simulation import (
    CostModel,
    SimulatedRequest,
    SimulatedResult,
    SimulationConfig,
    SimulationTotals,
    StepShape,
    StepWatcher,
)

from .decode_stretch import DecodeStretch
from .kv_cache import KVCache
from .observer import Observer
from .outputs import RequestError, RequestMetrics
from .planner import Planner
from .request import Request, Sequence
from .sampling_params import SamplingParams
from .settle import publish
from .slot_table import SlotTable
from .step_cost import SAMPLES
from .step_plan import StepPlan
from .step_shape import step_shape

_PARAMS = SamplingParams(ignore_eos=True)
_KEY_BYTES = 9
LONGEST_TABLE = 1 << 20
"""Tokens of the longest request where ``max_model_len`` is not given; block tables are that wide."""


class _Counting(Observer):
    """Keeps what a result needs, and no timeline or log."""

    def _note(self, kind: EventKind, sequence: Sequence, tokens: int, now: float) -> None:
        if kind == "finished":
            metrics = sequence.request.metrics
            metrics.output_tokens += tokens
            metrics.longest_output = max(metrics.longest_output, tokens)

    def waits(self, sequence: Sequence, reason: str) -> None:
        return None

    def first_token(self, sequence: Sequence) -> None:
        metrics = sequence.request.metrics
        if metrics.first_token is None:
            metrics.first_token = self.clock()


class SimulatedEngine:
    """See :class:`deepinfer_core.api.simulation.Simulation`."""

    def __init__(
        self,
        policy: Policy,
        config: SimulationConfig,
        cost: CostModel,
        on_result: Callable[[SimulatedResult], None],
        *,
        watch: StepWatcher | None = None,
        stepwise: bool = False,
    ) -> None:
        self.now = 0.0
        self.cost = cost
        self.on_result = on_result
        self.watch = watch
        group = CacheGroupSpec(name="full", layers=1, entries=())
        capacity = (config.num_blocks - 1) * config.block_size
        self.longest = min(capacity, config.max_model_len or LONGEST_TABLE)
        self.slots = SlotTable(config.max_running)
        self.planner = Planner(
            policy=policy,
            cache=KVCache(
                (group,),
                {"full": config.num_blocks},
                block_size=config.block_size,
                slots=config.max_running,
                max_model_len=self.longest,
                prefix_cache=config.prefix_cache,
            ),
            slots=self.slots,
            max_batch_tokens=config.max_batch_tokens,
            chunked_prefill=config.chunked_prefill,
            clock=lambda: self.now,
            observer=_Counting(self.slots, clock=lambda: self.now),
        )
        self.ends = np.zeros(config.max_running, np.int64)
        self.last_plan: StepPlan | None = None
        self.unfinished = 0
        self.outstanding = 0
        self._totals = SimulationTotals()
        self._stretch = None if stepwise else DecodeStretch(self.planner, self.ends)
        self._asked: dict[int, tuple[SimulatedRequest, Request]] = {}
        self._ends: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._own_keys = itertools.count(1)

    def totals(self) -> SimulationTotals:
        self._totals.preemptions = self.planner.preemption.count
        self._totals.policy_failures = self.planner.guard.failures
        return self._totals

    # ---- arrivals

    def add(self, asked: SimulatedRequest) -> None:
        self.now = max(self.now, asked.arrival)
        planner = self.planner
        refusal = self._too_long(asked)
        if refusal is not None:
            self._report(asked, RequestMetrics(arrival=asked.arrival, finished=self.now), refusal)
            return
        request = self._request(asked)
        self.unfinished += 1
        self.outstanding += self._work(asked)
        for sequence in request.sequences:
            self._asked[sequence.number] = (asked, request)
            planner.enqueue(sequence)
        answer = planner.guard.admit(request)
        if not answer.accepted:
            for sequence in request.sequences:
                sequence.error = RequestError("rejected", answer.reason)
                self._end(sequence, 0)

    def _too_long(self, asked: SimulatedRequest) -> str | None:
        if asked.prompt >= self.longest:
            return f"prompt has {asked.prompt} tokens, the longest request {self.longest}"
        if not self.planner.chunked_prefill and asked.prompt > self.planner.max_batch_tokens:
            return f"prompt has {asked.prompt} tokens, a step {self.planner.max_batch_tokens}, and chunking is off"
        if len(asked.outputs) > self.slots.slots:
            return f"{len(asked.outputs)} completions, max_running is {self.slots.slots}"
        return None

    def _request(self, asked: SimulatedRequest) -> Request:
        prompt, block = asked.prompt, self.planner.cache.block_size
        most = asked.max_tokens or max(asked.outputs)
        request = Request(
            request_id=asked.id,
            prompt=None,
            prompt_token_ids=range(prompt),  # type: ignore[arg-type]  # only its length is looked at
            params=_PARAMS,
            seed=0,
            root_key=b"",
            max_len=min(self.longest, prompt + most),
            eos_token_ids=(),
            stop_token_ids=(),
            tenant=asked.tenant,
            priority=asked.priority,
            deadline=asked.deadline,
            ttft_target=asked.ttft_target,
            tpot_target=asked.tpot_target,
            metrics=RequestMetrics(arrival=asked.arrival),
        )
        known = [number.to_bytes(_KEY_BYTES, "little", signed=True) for number in asked.blocks]
        shared = known[: prompt // block]
        shared += self._unique(prompt // block - len(shared))
        for child, output in enumerate(asked.outputs):
            end = min(request.max_len, prompt + output)
            keys = shared + (known[len(shared) : end // block] if child == 0 else [])
            sequence = Sequence(
                request=request,
                child=child,
                number=next(self._numbers),
                tokens=np.broadcast_to(np.int32(0), (prompt,)),
                keys=keys + self._unique(end // block - len(keys)),
            )
            self._ends[sequence.number] = end
            request.sequences.append(sequence)
        return request

    def _unique(self, count: int) -> list[bytes]:
        """Keys of content that nobody else has, as long as nothing is known of it: below zero, where no trace's are."""
        return [(-next(self._own_keys)).to_bytes(_KEY_BYTES, "little", signed=True) for _ in range(count)]

    def _work(self, asked: SimulatedRequest) -> int:
        return asked.prompt + sum(asked.outputs)

    # ---- time

    def run_until(self, time: float) -> None:
        while self.unfinished and self.now < time:
            self.step(time)
        if time != float("inf"):
            self.now = max(self.now, time)

    def step(self, limit: float = 0.0, seconds: float | None = None) -> StepShape:
        """One step, and then all pure decode steps that start before ``limit``.

        Args:
            seconds: what the step takes; None asks the cost model.
        """
        plan = self.planner.plan()
        assert plan is not None, "the planner found nothing to run for requests that are there"
        shape = step_shape(plan, self.slots)
        self.last_plan = plan
        took = self.cost.seconds(shape) if seconds is None else seconds
        self._advance(shape, took)
        self._commit(plan)
        self.planner.step_cost.record(shape.tokens, took)
        if self._stretch is not None and self.now < limit:
            self._stretch_to(limit)
        return shape

    def _stretch_to(self, limit: float) -> None:
        assert self._stretch is not None
        first = self._stretch.first()
        if first is None:
            return
        rows, context, steps = first
        seconds = self.cost.decode_seconds(rows, context, steps)
        times = np.concatenate(([self.now], seconds)).cumsum()
        steps = self._stretch.advance(int(np.searchsorted(times[:-1], limit, "left")))
        if not steps:
            return
        start, self.now = self.now, float(times[steps])
        totals = self._totals
        totals.steps += steps
        totals.busy += self.now - start
        totals.output_tokens += rows * steps
        for value in seconds[max(0, steps - SAMPLES) : steps].tolist():
            self.planner.step_cost.record(rows, value)
        if self.watch is not None:
            for k in range(steps):
                self.watch(StepShape(0, rows, rows, 0, context + k * rows), float(times[k]), float(seconds[k]))

    def _advance(self, shape: StepShape, seconds: float) -> None:
        start = self.now
        self.now += seconds
        totals = self._totals
        totals.steps += 1
        totals.busy += seconds
        totals.prefill_tokens += shape.prefill
        totals.output_tokens += shape.sampled
        if self.watch is not None:
            self.watch(shape, start, seconds)

    def _commit(self, plan: StepPlan) -> None:
        """What the committer does, for tokens that are only counted and end at known lengths."""
        table, slots = self.slots, plan.slots
        for sequence in plan.admitted:
            self.ends[sequence.slot] = self._ends[sequence.number]
            self._totals.queried += len(sequence.tokens)
            self._totals.cached += int(self.planner.fields.cached[sequence.slot])
        table.in_flight[slots] -= 1
        computed = plan.starts + plan.counts
        sampled = plan.samples > 0
        table.committed[slots[sampled]] = computed[sampled] + 1
        publish(self.planner, slots, computed)
        first = sampled & (computed == table.prompt_len[slots])
        ended = sampled & (computed + 1 >= self.ends[slots])
        for i in np.nonzero(first | ended)[0].tolist():
            sequence = self._at(int(slots[i]))
            if first[i]:
                self.planner.observer.first_token(sequence)
            if ended[i]:
                self._end(sequence, int(computed[i]) + 1 - sequence.prompt_len)

    def _at(self, slot: int) -> Sequence:
        sequence = self.slots.sequence[slot]
        assert sequence is not None
        return sequence

    def _end(self, sequence: Sequence, output: int) -> None:
        sequence.finish_reason = "error" if sequence.error is not None else "length"
        self.planner.remove(sequence)
        self.planner.tell("finished", sequence, output)
        asked, request = self._asked.pop(sequence.number)
        del self._ends[sequence.number]
        if request.finished:
            request.metrics.finished = self.now
            self.unfinished -= 1
            self.outstanding -= self._work(asked)
            self._report(asked, request.metrics, None if sequence.error is None else sequence.error.message)

    def _report(self, asked: SimulatedRequest, metrics: RequestMetrics, refused: str | None) -> None:
        assert metrics.finished is not None
        self.on_result(
            SimulatedResult(
                request=asked,
                first_scheduled=metrics.first_scheduled,
                first_token=metrics.first_token,
                finished=metrics.finished,
                output=metrics.output_tokens,
                longest_output=metrics.longest_output,
                cached=metrics.cached_tokens,
                preemptions=metrics.preemptions,
                refused=refused,
            )
        )
