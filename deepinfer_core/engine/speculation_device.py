"""The device's part of drafting on the device: what runs inside a step's closure, before and after the target.

Closures run in order, so each finds what the one before it left: the drafts it proposed and how far each request
really came. On an accelerator that is one small read-back a step; on the host it is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import structlog
import torch

from deepinfer_core.api import (
    Device,
    DeviceDrafter,
    DraftSchedule,
    DraftStep,
    JudgedRows,
    LayerCache,
    ModelBatch,
    Proposal,
    SamplingBatch,
    SamplingState,
    StepLayout,
)

from .kv_cache import KVCache
from .sampler import Sampler
from .speculation import accepted_drafts, judged_places, judged_rows, last_tokens
from .speculation_idle import IdleRows, IdleSteps, joined
from .speculation_plan import DraftTurn, first_come, survival
from .speculation_rows import BlockRows, Pending, Proposed, TargetRows, check_proposal
from .step_plan import StepPlan

if TYPE_CHECKING:
    from .step_inputs import StepInputs

log = structlog.get_logger("deepinfer.speculation")

Array = np.ndarray[Any, Any]
MakeLayouts = Callable[["BlockRows"], Mapping[str, StepLayout]]


class DraftRuntime:
    """One device drafter in use. Whatever it does wrong costs drafts, never a request.

    Args:
        layouts, step_layouts: the engine's layouts of a drafter's own rows, and of a step's with the groups named.
        caches: module's cache group -> (engine's name of it, its layers' caches); empty without a module.
        keep: what the module reads of what leaves the target's layers ``taps``.
        most_rows: of a batch that the module runs at once.
        always_judge: judge by rejection also drafts that come without a distribution; the draw accepts those as often.
    """

    def __init__(
        self,
        drafter: DeviceDrafter,
        *,
        device: Device,
        state: SamplingState,
        sampler: Sampler,
        append: Callable[..., None],
        layouts: MakeLayouts,
        step_layouts: Callable[[StepInputs, Iterable[str]], Mapping[str, StepLayout]],
        cache: KVCache,
        caches: Mapping[str, tuple[str, Sequence[LayerCache]]],
        taps: Sequence[int],
        keep: Callable[[torch.Tensor], torch.Tensor],
        depth: int,
        most_rows: int,
        token_limit: int,
        vocab_size: int,
        slots: int,
        always_judge: bool,
        schedule: DraftSchedule | None,
    ) -> None:
        self.drafter = drafter
        self.device = device
        self.taps = taps
        self.keep = keep
        self.depth = depth
        self.token_limit = token_limit
        self.vocab_size = vocab_size
        self.failures = 0
        self.absorb_seconds = 0.0
        self._state = state
        self._sampler = sampler
        self._append = append
        self._most_rows = most_rows
        self._layouts = layouts
        self._step_layouts = step_layouts
        self._cache = cache
        self._caches = caches
        self._always_judge = always_judge
        self._schedule = schedule
        self._behind = np.zeros(slots, np.int64)
        self.idle = IdleSteps()
        self._pending: Pending | None = None
        self._nobody = device.upload(np.zeros(0, np.int64))
        self._generator = torch.Generator(device.torch_device)
        self._generator.seed()

    # ---- before the target

    def forget(self) -> None:
        """The step failed: what the one before it left is of no use any more."""
        self._pending = None

    def admits(self) -> None:
        """Slots get other requests now: the steps before are shown to the drafter while their tokens stand there."""
        self._show_unseen()

    def resolve(self, plan: StepPlan) -> StepPlan:
        """The plan with its true starts, and with the drafts that are verified."""
        turn = plan.turn
        assert turn is not None
        if self._pending is None and not turn.caps.any() and not turn.floating.any():
            return plan  # nothing is offered: the plan is true as it is
        starts = plan.starts - np.where(turn.floating, self._behind[plan.slots], 0)
        taken, drafts, confidence, notes = np.zeros_like(turn.caps), {}, {}, {}
        pending = self._pending
        if pending is not None:
            for sequence in plan.admitted:
                pending.row[sequence.slot] = -1  # whoever had the slot before drafted for itself
        if pending is not None and turn.total:
            found = pending.row[plan.slots]
            fits = (found >= 0) & (pending.anchors[found] == starts)
            caps = np.where(fits, np.minimum(turn.caps, pending.available[found]), 0)
            taken = self._allocate(pending.chances[found], caps, min(turn.total, int(caps.sum())))
            for i in np.nonzero(taken)[0].tolist():
                slot, row = int(plan.slots[i]), int(found[i])
                drafts[slot] = pending.tokens[row, : taken[i]]
                if pending.confidence is not None:
                    confidence[slot] = pending.confidence[row, : taken[i]]
                if pending.notes is not None:
                    notes[slot] = pending.notes[row, : taken[i]]
        spare = turn.caps - taken
        has_scores = pending is not None and pending.scores is not None
        return attrs.evolve(
            plan,
            starts=starts,
            counts=plan.counts - spare,
            samples=plan.samples - spare,
            drafts=drafts,
            confidence=confidence,
            notes=notes,
            rejects=plan.rejects if self._always_judge or has_scores else None,
        )

    def judged(self, plan: StepPlan) -> JudgedRows | None:
        """The rows of a resolved plan that rejection sampling decides."""
        pending = self._pending
        scores = None if pending is None else pending.scores
        rows, drafts = judged_rows(plan)
        if len(rows) == 0:
            return None
        kept = None
        if scores is not None:
            assert pending is not None
            index = np.array([pending.row[slot] * scores.shape[1] + j for slot, j in judged_places(plan)], np.int64)
            kept = scores.flatten(0, 1)[self.device.upload(index)]
        return JudgedRows(rows=self.device.upload(rows), drafts=self.device.upload(drafts), scores=kept)

    def _allocate(self, chances: Array, caps: Array, total: int) -> Array:
        if self._schedule is None or total >= int(caps.sum()):
            return first_come(caps, total)
        known = chances * (np.arange(chances.shape[1]) < caps[:, None])
        counts = np.asarray(self._schedule.allocate(known, caps, total)).clip(0, caps)
        return counts if int(counts.sum()) <= total else first_come(counts, total)

    # ---- after the target

    def after(self, ran: TargetRows) -> Proposed | None:
        """Let the drafter see what the target did, and draft for the next step."""
        plan = ran.plan
        turn = plan.turn
        assert turn is not None
        self._pending = None
        self.absorb_seconds = 0.0
        self.idle.ran()
        if ran.tokens is None:
            self._behind[plan.slots] = turn.caps
            if self.idle.add(ran):
                self._show_unseen()
            return None
        self._show_unseen()
        accepted = accepted_drafts(plan, ran.tokens)
        self._behind[plan.slots] = turn.caps - accepted
        try:
            step, chosen = self._step(ran, turn, accepted)
            self._absorb(step)
            if len(chosen) == 0:
                return None
            return self._keep(self.drafter.propose(step), plan.slots[chosen], step.host_anchors)
        except Exception:
            self._failed()
            return None

    def _absorb(self, step: DraftStep) -> None:
        started = time.perf_counter()
        self.drafter.absorb(step)
        self.absorb_seconds += time.perf_counter() - started

    def _show_unseen(self) -> None:
        """Let the drafter absorb the steps that drafted for nobody, as one."""
        if unseen := self.idle.take():
            try:
                self._absorb(self._idle_step(unseen))
            except Exception:
                self._failed()

    def _failed(self) -> None:
        self.failures += 1
        log.exception("drafter raised", call="absorb or propose")

    def _idle_step(self, steps: Sequence[IdleRows]) -> DraftStep:
        """Steps that draft for nobody."""
        ran = joined(steps, [engine for engine, _ in self._caches.values()])
        inputs = ran.inputs

        def refuse(*_: Any) -> Any:
            raise RuntimeError("no request to draft for: this step has slots of length 0")

        return DraftStep(
            state=self._state,
            slots=self._nobody,
            anchors=self._nobody,
            host_anchors=np.zeros(0, np.int64),
            depth=self.depth,
            rows=self._rows(inputs, ran.token_ids, {}),
            places=self._places(inputs, inputs.seq_lens),
            tables={name: inputs.tables[engine][:0] for name, (engine, _) in self._caches.items()},
            readable=self._readable,
            next_tokens=lambda: self._next_tokens(inputs),
            taps=ran.taps,
            last_rows=self._nobody,
            reread=lambda counts: iter(()),
            block=refuse,
            choose=refuse,
        )

    def _rows(
        self, inputs: StepInputs, tokens: torch.Tensor | None, known: Mapping[str, StepLayout]
    ) -> ModelBatch | None:
        """``tokens [T]``, None where a graph ran; ``known``: layouts of the rows, perhaps without the module's."""
        if not self._caches or tokens is None:
            return None
        names = [engine for engine, _ in self._caches.values()]
        return self._batch(tokens, known if names[0] in known else self._step_layouts(inputs, names))

    def _places(self, inputs: StepInputs, next_positions: Array) -> dict[str, Array]:
        return {
            name: self._cache.places(
                engine, inputs.tables[engine], inputs.row_requests, inputs.positions, next_positions
            )
            for name, (engine, _) in self._caches.items()
        }

    def _readable(self, group: str, blocks: Array) -> Array:
        return self._cache.readable(self._caches[group][0], blocks)

    def _next_tokens(self, inputs: StepInputs) -> torch.Tensor:
        """The token after each row of the target's, ``[T]`` int64."""
        history, upload = self._state.history, self.device.upload
        following = np.minimum(inputs.positions + 1, history.shape[1] - 1)
        return history[upload(inputs.row_slots), upload(following)].to(torch.int64)

    def _step(self, ran: TargetRows, turn: DraftTurn, accepted: Array) -> tuple[DraftStep, Array]:
        assert ran.tokens is not None
        plan, upload = ran.plan, self.device.upload
        verified = np.array([len(plan.drafts.get(slot, ())) for slot in plan.slots.tolist()], np.int64)
        advance = plan.counts - (verified - accepted)
        wanted = turn.room & (plan.samples > 0) & (last_tokens(plan, ran.tokens, accepted) >= 0)
        chosen = np.nonzero(wanted)[0] if turn.propose else np.zeros(0, np.int64)
        anchors = (plan.starts + advance)[chosen]
        row_starts = np.cumsum(plan.counts) - plan.counts
        state = self._state
        slots, device_anchors, last_rows = (
            (upload(plan.slots[chosen]), upload(anchors), upload((row_starts + advance - 1)[chosen]))
            if len(chosen)
            else (self._nobody,) * 3
        )
        rejects = upload(turn.rejects[chosen]) if turn.rejects is not None and turn.rejects[chosen].any() else None
        tables = {engine: ran.inputs.tables[engine][chosen] for engine, _ in self._caches.values()}

        def block(tokens: torch.Tensor, offset: int) -> ModelBatch:
            counts = np.full(len(chosen), tokens.shape[1], np.int64)
            layouts = self._layouts(BlockRows(starts=anchors + offset, counts=counts, tables=tables))
            return self._batch(tokens.flatten(), layouts)

        def choose(scores: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return self._choose(scores, j, ran.active, slots, device_anchors, int(anchors.max()), rejects)

        step = DraftStep(
            state=state,
            slots=slots,
            anchors=device_anchors,
            host_anchors=anchors,
            depth=self.depth,
            rows=None if ran.batch is None else self._rows(ran.inputs, ran.batch.token_ids, ran.batch.layouts),
            places=self._places(ran.inputs, plan.starts + plan.counts - verified),
            tables={name: tables[engine] for name, (engine, _) in self._caches.items()},
            readable=self._readable,
            next_tokens=lambda: self._next_tokens(ran.inputs),
            taps=ran.taps,
            last_rows=last_rows,
            reread=lambda counts: self._reread(plan.slots[chosen], anchors, counts, tables),
            block=block,
            choose=choose,
        )
        return step, chosen

    def _reread(self, slots: Array, anchors: Array, counts: Array, tables: Mapping[str, Array]) -> Iterator[ModelBatch]:
        """The last ``counts`` rows before the anchors, as ``DraftStep.reread`` says."""
        left = np.minimum(counts, anchors).astype(np.int64)
        while left.any():
            taken = first_come(left, self._most_rows)
            some = np.nonzero(taken)[0]
            starts = (anchors - left)[some]
            rows = BlockRows(
                starts=starts, counts=taken[some], tables={name: table[some] for name, table in tables.items()}
            )
            layouts = self._layouts(rows)
            owners = self.device.upload(np.repeat(slots[some], taken[some]))
            positions = next(iter(layouts.values())).positions
            yield self._batch(self._state.history[owners, positions].to(torch.int64), layouts)
            left -= taken

    def _batch(self, token_ids: torch.Tensor, layouts: Mapping[str, StepLayout]) -> ModelBatch:
        """The module's view: its own names of the groups."""
        own = {name: layouts[engine] for name, (engine, _) in self._caches.items()}
        return ModelBatch(
            token_ids=token_ids,
            positions=next(iter(own.values())).positions,
            layouts=own,
            caches={name: layers for name, (_, layers) in self._caches.items()},
        )

    def _choose(
        self,
        scores: torch.Tensor,
        j: int,
        active: frozenset[str],
        slots: torch.Tensor,
        anchors: torch.Tensor,
        highest: int,
        rejects: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft j of each request, drawn as its request samples.

        Exact rows share the target's noise, so that draft and target agree as often as a coupling can. Rejected rows
        need noise of their own, fresh in every step: how many drafts are verified may depend on earlier drafts.
        """
        positions = anchors + 1 + j
        batch = SamplingBatch(
            state=self._state,
            slots=slots,
            positions=positions,
            token_limit=self.token_limit,
            active=active,
            max_position=highest + 1 + j,
        )
        if (lacking := self.vocab_size - scores.shape[1]) > 0:
            scores = torch.nn.functional.pad(scores, (0, lacking), value=float("-inf"))
        processed = self._sampler.process(scores.to(torch.float32), batch)
        tokens = self._sampler.draw(processed, batch)
        if rejects is not None:
            noise = torch.empty_like(processed).exponential_(generator=self._generator).log()
            fresh = (processed - noise).argmax(dim=-1)
            tokens = torch.where(rejects & (tokens >= 0), fresh, tokens)
        self._append(self._state.history, slots, positions, tokens)
        return tokens, processed if rejects is not None else None

    def _keep(self, proposal: Proposal, slots: Array, anchors: Array) -> Proposed:
        check_proposal(proposal, len(slots), self.depth, self.vocab_size)
        tokens = self.device.download(proposal.tokens)[:, : self.depth]
        good = np.logical_and.accumulate((tokens >= 0) & (tokens < self.token_limit), axis=1)
        confidence = None
        if proposal.confidence is not None:
            confidence = self.device.download(proposal.confidence)[:, : self.depth].astype(np.float64)
        chances = survival(np.ones(tokens.shape) if confidence is None else confidence) * good
        row = np.full(len(self._behind), -1, np.int64)
        row[slots] = np.arange(len(slots))
        self._pending = Pending(
            row=row,
            anchors=anchors,
            tokens=tokens.astype(np.int64),
            available=good.sum(axis=1),
            confidence=confidence,
            chances=chances,
            scores=proposal.scores,
            notes=None if proposal.notes is None else self.device.download(proposal.notes)[:, : self.depth],
        )
        return Proposed(slots=slots, chances=chances, learned=proposal.learned)
