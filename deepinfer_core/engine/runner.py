"""Runs planned steps on the device: inputs, forward pass, sampling, one closure per step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import structlog
import torch

from deepinfer_core.api import (
    AppendTokensRequest,
    Device,
    Event,
    InputIdsRequest,
    JudgedRows,
    LayerCache,
    LogprobsResult,
    Model,
    ModelBatch,
    OpRequest,
    SamplingBatch,
    SlotMappingRequest,
    StageInfo,
    StepLayout,
    Stream,
    VerifyCost,
)

from .constraint_masks import StepMasks
from .decode_graphs import DecodeGraphs
from .device_state import DeviceState
from .kv_cache import KVCache
from .launched_step import FillMasks, LaunchedStep, Passed, ReadyStep, StepResult
from .prompt_logprobs import PromptRows, prompt_rows
from .sampler import LogprobRows, Sampled, Sampler, stage_order
from .slot_needs import SlotNeeds
from .slot_table import SlotTable
from .speculation import judged_rows
from .speculation_device import DraftRuntime
from .speculation_rows import BlockRows, TargetRows
from .step_inputs import DraftInputs, Snapshot, StepInputs, snapshot, step_inputs
from .step_plan import StepPlan

log = structlog.get_logger("deepinfer.engine")

Array = np.ndarray[Any, Any]

PROMPT_LOGIT_ROWS = 256
"""Prompt rows turned into logits at a time, to bound memory."""


def runner_requests(device_type: str, demands: frozenset[str], block_size: int) -> dict[str, OpRequest]:
    """Slot name -> request of the runner's own operators."""
    return {
        "input_ids": InputIdsRequest(device_type=device_type, demands=demands),
        "slot_mapping": SlotMappingRequest(device_type=device_type, demands=demands, block_size=block_size),
        "append_tokens": AppendTokensRequest(device_type=device_type, demands=demands),
    }


class Runner:
    """Owns the device side of an engine."""

    def __init__(
        self,
        *,
        device: Device,
        stream: Stream,
        model: Model,
        ops: Any,
        cache: KVCache,
        layer_caches: Mapping[str, Sequence[LayerCache]],
        slots: SlotTable,
        vocab_size: int,
        token_limit: int,
        extra_stages: Sequence[StageInfo] = (),
        graphs: DecodeGraphs | None = None,
        spare: int = 0,
        groups: Sequence[str] | None = None,
    ) -> None:
        self.device = device
        self.stream = stream
        self.model = model
        self.ops = ops
        self.cache = cache
        self.layer_caches = layer_caches
        self.slots = slots
        self.vocab_size = vocab_size
        self.token_limit = token_limit
        self.graphs = graphs
        self.spare = spare
        own = layer_caches if groups is None else groups  # others are a draft module's
        self.target_caches = {name: layer_caches[name] for name in own}
        self.drafting: DraftRuntime | None = None
        self.state = DeviceState(device, slots.slots, vocab_size, extra_stages, spare=spare)
        self.sampler = Sampler(ops, stage_order(extra_stages))
        self.needs = SlotNeeds(slots.slots, vocab_size=vocab_size, pads=token_limit < vocab_size, extra=extra_stages)

    def launch(self, plan: StepPlan, fill: FillMasks | None = None, *, hold: bool = False) -> LaunchedStep:
        """Snapshot the step's inputs and give its device work to the stream.

        Args:
            fill: for steps with rows that follow a grammar; the forward pass does not wait for the masks.
            hold: launch the forward pass alone; the step is sampled when its masks can be made. Not with a device
                drafter.
        """
        taken = self._snapshot(plan)
        if hold:
            return self._launch_held(plan, taken)
        known = None
        if self.drafting is None or plan.offers_nothing:
            inputs = step_inputs(plan, taken)
            known = ReadyStep(plan=plan, inputs=inputs, needs=self.needs.of(inputs.sample_slots))

        masks = [fill(plan)] if fill is not None and known is not None else []

        def work() -> StepResult:
            with torch.inference_mode():
                if self.drafting is None and known is not None:
                    return self._run(known, masks=masks[0] if masks else None)
                return self._run_drafting(plan, taken, fill, masks, known)

        return LaunchedStep(plan=plan, prompts=taken.prompts, event=self.stream.submit(work), masks=masks)

    def _launch_held(self, plan: StepPlan, taken: Snapshot) -> LaunchedStep:
        inputs = step_inputs(plan, taken)
        ready = ReadyStep(plan=plan, inputs=inputs, needs=self.needs.of(inputs.sample_slots))
        passed: list[Passed] = []

        def forward() -> StepResult:
            with torch.inference_mode():
                passed.append(self._pass(ready, None))
            return StepResult(ready=ready, sampled=None, prompts=passed[0].prompts)

        def sample(masks: StepMasks) -> Event[StepResult]:
            def work() -> StepResult:
                if not passed:
                    return event.wait()  # raises what the forward pass raised
                with torch.inference_mode():
                    return self._finish(ready, passed[0], None, masks)

            return self.stream.submit(work)

        event = self.stream.submit(forward)
        return LaunchedStep(plan=plan, prompts=taken.prompts, event=event, held=sample)

    def close(self) -> None:
        self.stream.close()

    def _snapshot(self, plan: StepPlan) -> Snapshot:
        for sequence in plan.admitted:
            self.needs.set(sequence.slot, sequence)
        row_starts = np.cumsum(plan.counts) - plan.counts
        return snapshot(plan, self.cache, self._prompt_rows(plan, row_starts), self.spare)

    def _prompt_rows(self, plan: StepPlan, row_starts: Array) -> list[PromptRows]:
        if not self.needs.any_prompt_logprobs:
            return []
        return prompt_rows(plan, self.slots, row_starts, self.vocab_size)

    # ---- device side

    def _run_drafting(
        self, plan: StepPlan, taken: Snapshot, fill: FillMasks | None, masks: list[StepMasks], known: ReadyStep | None
    ) -> StepResult:
        """A step whose drafts only the step before it knows; ``known``: one that none are offered to."""
        assert self.drafting is not None
        try:
            if plan.admitted:
                self.drafting.admits()
            if known is not None:
                return self._run(known, self.drafting, masks[0] if masks else None)
            resolved = self.drafting.resolve(plan)
            inputs = step_inputs(resolved, taken)
            if fill is not None:
                masks.append(fill(resolved))
            ready = ReadyStep(plan=resolved, inputs=inputs, needs=self.needs.read(inputs.sample_slots))
            return self._run(ready, self.drafting, masks[0] if masks else None)
        except BaseException:
            self.drafting.forget()
            raise

    def _run(
        self, ready: ReadyStep, drafting: DraftRuntime | None = None, masks: StepMasks | None = None
    ) -> StepResult:
        return self._finish(ready, self._pass(ready, drafting), drafting, masks)

    def _pass(self, ready: ReadyStep, drafting: DraftRuntime | None) -> Passed:
        inputs = ready.inputs
        started = time.perf_counter()
        self.state.write(inputs.entering)
        if inputs.drafts is not None:
            self._write_drafts(inputs.drafts)
        history = self.state.sampling.history
        groups = self.target_caches if drafting is None or ready.plan.drafts_nothing else self.layer_caches
        hidden, batch, taps = self._target(inputs, history, drafting, groups)
        prompts = [self._prompt(hidden, p) for p in inputs.prompts]
        return Passed(hidden, batch, taps, prompts, started)

    def _finish(
        self, ready: ReadyStep, passed: Passed, drafting: DraftRuntime | None, masks: StepMasks | None
    ) -> StepResult:
        inputs = ready.inputs
        sampled = self._sample_rows(passed.hidden, ready, drafting, masks) if len(inputs.sample_rows) else None
        result = StepResult(ready=ready, sampled=sampled, prompts=passed.prompts, masks=masks)
        if drafting is not None:
            idle = ready.plan.drafts_nothing
            measures = drafting.idle.measures if idle else "step"
            tokens = np.zeros(0, np.int64)
            if sampled is not None and measures != "nothing":
                tokens = self.device.download(sampled.tokens)
            between = time.perf_counter()
            ran = TargetRows(
                plan=ready.plan,
                inputs=inputs,
                batch=passed.batch,
                taps=passed.taps,
                tokens=None if idle else tokens,
                active=ready.needs.active,
            )
            result.proposed = drafting.after(ran)
            if measures != "step":
                return result
            result.cost = VerifyCost(
                rows=len(inputs.positions),
                requests=len(inputs.counts),
                target_seconds=between - passed.started,
                draft_seconds=time.perf_counter() - between,
                drafted=0 if result.proposed is None else len(result.proposed.slots),
                decode=bool((ready.plan.counts == ready.plan.samples).all()),
                absorb_seconds=drafting.absorb_seconds,
                chances=None if result.proposed is None else result.proposed.chances,
                learned=result.proposed is not None and result.proposed.learned,
                steps=drafting.idle.measured(),
            )
        return result

    def _target(
        self, inputs: StepInputs, history: torch.Tensor, drafting: DraftRuntime | None, groups: Iterable[str]
    ) -> tuple[torch.Tensor, ModelBatch | None, Sequence[torch.Tensor]]:
        """``[T, hidden]`` of the model; the batch with the groups named unless a graph ran; what a drafter reads."""
        if self.graphs is not None and self.graphs.takes(inputs):
            return self.graphs.run(inputs, history), None, ()
        upload = self.device.upload
        positions, row_requests = upload(inputs.positions), upload(inputs.row_requests)
        whole = ModelBatch(
            token_ids=self.ops.input_ids.run(history, upload(inputs.row_slots), positions),
            positions=positions,
            layouts=self._layouts(inputs, positions, row_requests, groups),
            caches=self.layer_caches,
        )
        batch = attrs.evolve(
            whole, layouts={name: whole.layouts[name] for name in self.target_caches}, caches=self.target_caches
        )
        if drafting is None or not drafting.taps:
            return self.model.forward(batch, self.model.plan(batch)), whole, ()
        model: Any = self.model
        hidden, taps = model.forward_tapped(batch, model.plan(batch), drafting.taps, drafting.keep)
        return hidden, whole, taps

    def _sample_rows(
        self, hidden: torch.Tensor, ready: ReadyStep, drafting: DraftRuntime | None, masks: StepMasks | None
    ) -> Sampled:
        upload, inputs, needs = self.device.upload, ready.inputs, ready.needs
        if len(inputs.sample_rows) < len(inputs.positions):
            hidden = hidden[upload(inputs.sample_rows)]
        sampling = SamplingBatch(
            state=self.state.sampling,
            slots=upload(inputs.sample_slots),
            positions=upload(inputs.sample_positions),
            token_limit=self.token_limit,
            active=needs.active,
            max_position=int(inputs.sample_positions.max()),
            grammar=None if masks is None else upload(masks.wait()),
        )
        rows = LogprobRows(
            raw=upload(needs.raw_rows) if len(needs.raw_rows) else None,
            raw_k=needs.raw_k,
            processed=upload(needs.processed_rows) if len(needs.processed_rows) else None,
            processed_k=needs.processed_k,
        )
        sampled = self._sample(hidden, sampling, rows, self._judged(ready.plan, drafting), needs.pads_only)
        self.ops.append_tokens.run(self.state.sampling.history, sampling.slots, sampling.positions, sampled.tokens)
        return sampled

    def _judged(self, plan: StepPlan, drafting: DraftRuntime | None) -> JudgedRows | None:
        """Rows that rejection sampling decides; a host drafter's drafts come without a distribution."""
        if plan.rejects is None or not plan.drafts:
            return None
        if drafting is not None:
            return drafting.judged(plan)
        rows, drafts = judged_rows(plan)
        if len(rows) == 0:
            return None
        return JudgedRows(rows=self.device.upload(rows), drafts=self.device.upload(drafts), scores=None)

    def _sample(
        self,
        hidden: torch.Tensor,
        batch: SamplingBatch,
        rows: LogprobRows,
        judged: JudgedRows | None,
        pads_only: bool,
    ) -> Sampled:
        try:
            return self.sampler.run(self.model.logits(hidden), batch, rows, judged, pads_only=pads_only)
        except Exception as error:
            if self.device.is_out_of_memory(error):
                raise
            log.exception("a sampling stage raised; sampling each row alone", rows=len(batch.slots))
            return self.sampler.run_apart(self.model.logits(hidden), batch, rows)

    def _write_drafts(self, drafts: DraftInputs) -> None:
        """Drafts stand in the history while they are verified; the tokens drawn replace them."""
        upload = self.device.upload
        self.ops.append_tokens.run(
            self.state.sampling.history, upload(drafts.slots), upload(drafts.positions), upload(drafts.tokens)
        )

    def step_layouts(self, inputs: StepInputs, groups: Iterable[str]) -> dict[str, StepLayout]:
        """Layouts of a step's rows in the groups named."""
        upload = self.device.upload
        return self._layouts(inputs, upload(inputs.positions), upload(inputs.row_requests), groups)

    def _layouts(
        self, inputs: StepInputs, positions: torch.Tensor, row_requests: torch.Tensor, groups: Iterable[str]
    ) -> dict[str, StepLayout]:
        upload = self.device.upload
        cu_seqlens, seq_lens = upload(inputs.cu_seqlens), upload(inputs.seq_lens)
        layouts = {}
        for name in groups:
            table = upload(inputs.tables[name])
            mapping = self.ops.slot_mapping.run(table, row_requests, positions)
            if inputs.redirect_below is not None:
                # A fully cached prompt recomputes its last token: its shared cache row stays as it is.
                shared = positions < upload(inputs.redirect_below)[row_requests]
                mapping = torch.where(shared, positions % self.cache.block_size, mapping)
            layouts[name] = StepLayout(
                block_size=self.cache.block_size,
                cu_seqlens=cu_seqlens,
                seq_lens=seq_lens,
                positions=positions,
                block_table=table,
                slot_mapping=mapping,
                host_query_lens=inputs.counts,
                host_seq_lens=inputs.seq_lens,
                max_query_len=int(inputs.counts.max()),
                max_seq_len=int(inputs.seq_lens.max()),
            )
        return layouts

    def block_layouts(self, rows: BlockRows) -> dict[str, StepLayout]:
        """Layouts of rows that a drafter runs on its own, by the engine's names of its groups."""
        upload, counts = self.device.upload, rows.counts
        owners = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        first = np.repeat(rows.starts - (ends - counts), counts)
        positions, row_requests = upload(np.arange(len(owners)) + first), upload(owners)
        cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)
        seq_lens = (rows.starts + counts).astype(np.int32)
        device_cu, device_lens = upload(cu_seqlens), upload(seq_lens)
        layouts = {}
        for name, host_table in rows.tables.items():
            table = upload(host_table)
            layouts[name] = StepLayout(
                block_size=self.cache.block_size,
                cu_seqlens=device_cu,
                seq_lens=device_lens,
                positions=positions,
                block_table=table,
                slot_mapping=self.ops.slot_mapping.run(table, row_requests, positions),
                host_query_lens=counts.astype(np.int32),
                host_seq_lens=seq_lens,
                max_query_len=int(counts.max(initial=0)),
                max_seq_len=int(seq_lens.max(initial=0)),
            )
        return layouts

    def _prompt(self, hidden: torch.Tensor, rows: PromptRows) -> LogprobsResult:
        parts = []
        for start in range(0, len(rows.targets), PROMPT_LOGIT_ROWS):
            targets = rows.targets[start : start + PROMPT_LOGIT_ROWS]
            first = rows.first_row + start
            logits = self.model.logits(hidden[first : first + len(targets)])
            parts.append(self.sampler.logprobs(logits, self.device.upload(targets), rows.k))
        return LogprobsResult(*(torch.cat(column) for column in zip(*map(attrs.astuple, parts), strict=True)))
