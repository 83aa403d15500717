"""Runs planned steps on the device: inputs, forward pass, sampling, one closure per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
)

from .decode_graphs import DecodeGraphs
from .device_state import DeviceState
from .kv_cache import KVCache
from .planner import StepPlan
from .prompt_logprobs import PromptRows, prompt_rows
from .sampler import LogprobRows, Sampled, Sampler, stage_order
from .slot_needs import SlotNeeds
from .slot_table import SlotTable
from .step_inputs import DraftInputs, StepInputs, step_inputs

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


@attrs.define(kw_only=True)
class StepResult:
    """Device results of one step. ``prompts`` pairs with ``StepInputs.prompts``."""

    sampled: Sampled | None
    prompts: list[LogprobsResult]


@attrs.define(kw_only=True)
class LaunchedStep:
    """A step on its way: what was planned, what it reads, and the event of its end."""

    plan: StepPlan
    inputs: StepInputs
    raw_rows: Array
    processed_rows: Array
    event: Event[StepResult]


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
        self.state = DeviceState(device, slots.slots, vocab_size, extra_stages)
        self.sampler = Sampler(ops, stage_order(extra_stages))
        self.needs = SlotNeeds(slots.slots, vocab_size=vocab_size, pads=token_limit < vocab_size, extra=extra_stages)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Snapshot the step's inputs and give its device work to the stream."""
        inputs = self._inputs(plan)
        needs = self.needs.of(inputs.sample_slots)

        def work() -> StepResult:
            with torch.inference_mode():
                rows = LogprobRows(
                    raw=self.device.upload(needs.raw_rows) if len(needs.raw_rows) else None,
                    raw_k=needs.raw_k,
                    processed=self.device.upload(needs.processed_rows) if len(needs.processed_rows) else None,
                    processed_k=needs.processed_k,
                )
                return self._run(inputs, needs.active, rows)

        return LaunchedStep(
            plan=plan,
            inputs=inputs,
            raw_rows=needs.raw_rows,
            processed_rows=needs.processed_rows,
            event=self.stream.submit(work),
        )

    def close(self) -> None:
        self.stream.close()

    def _inputs(self, plan: StepPlan) -> StepInputs:
        for sequence in plan.admitted:
            self.needs.set(sequence.slot, sequence)
        row_starts = np.cumsum(plan.counts) - plan.counts
        return step_inputs(plan, self.cache, self._prompt_rows(plan, row_starts))

    def _prompt_rows(self, plan: StepPlan, row_starts: Array) -> list[PromptRows]:
        if not self.needs.any_prompt_logprobs:
            return []
        return prompt_rows(plan, self.slots, row_starts, self.vocab_size)

    # ---- device side

    def _run(self, inputs: StepInputs, active: frozenset[str], rows: LogprobRows) -> StepResult:
        upload, ops = self.device.upload, self.ops
        self.state.write(inputs.entering)
        if inputs.drafts is not None:
            self._write_drafts(inputs.drafts)
        history = self.state.sampling.history
        if self.graphs is not None and self.graphs.takes(inputs):
            hidden = self.graphs.run(inputs, history)
        else:
            hidden = self._forward(inputs, history)
        prompts = [self._prompt(hidden, p) for p in inputs.prompts]
        if len(inputs.sample_rows) == 0:
            return StepResult(sampled=None, prompts=prompts)
        if len(inputs.sample_rows) < len(inputs.positions):
            hidden = hidden[upload(inputs.sample_rows)]
        sampling = SamplingBatch(
            state=self.state.sampling,
            slots=upload(inputs.sample_slots),
            positions=upload(inputs.sample_positions),
            token_limit=self.token_limit,
            active=active,
            max_position=int(inputs.sample_positions.max()),
        )
        sampled = self._sample(hidden, sampling, rows)
        ops.append_tokens.run(history, sampling.slots, sampling.positions, sampled.tokens)
        return StepResult(sampled=sampled, prompts=prompts)

    def _forward(self, inputs: StepInputs, history: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]``."""
        upload = self.device.upload
        positions, row_requests = upload(inputs.positions), upload(inputs.row_requests)
        batch = ModelBatch(
            token_ids=self.ops.input_ids.run(history, upload(inputs.row_slots), positions),
            positions=positions,
            layouts=self._layouts(inputs, positions, row_requests),
            caches=self.layer_caches,
        )
        return self.model.forward(batch, self.model.plan(batch))

    def _sample(self, hidden: torch.Tensor, batch: SamplingBatch, rows: LogprobRows) -> Sampled:
        try:
            return self.sampler.run(self.model.logits(hidden), batch, rows)
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

    def _layouts(
        self, inputs: StepInputs, positions: torch.Tensor, row_requests: torch.Tensor
    ) -> dict[str, StepLayout]:
        upload = self.device.upload
        cu_seqlens, seq_lens = upload(inputs.cu_seqlens), upload(inputs.seq_lens)
        layouts = {}
        for name, host_table in inputs.tables.items():
            table = upload(host_table)
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

    def _prompt(self, hidden: torch.Tensor, rows: PromptRows) -> LogprobsResult:
        parts = []
        for start in range(0, len(rows.targets), PROMPT_LOGIT_ROWS):
            targets = rows.targets[start : start + PROMPT_LOGIT_ROWS]
            first = rows.first_row + start
            logits = self.model.logits(hidden[first : first + len(targets)])
            parts.append(self.sampler.logprobs(logits, self.device.upload(targets), rows.k))
        return LogprobsResult(*(torch.cat(column) for column in zip(*map(attrs.astuple, parts), strict=True)))
