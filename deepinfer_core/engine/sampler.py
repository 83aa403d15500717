"""Runs the sampling stages that a step needs, in their fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from deepinfer_core.api import (
    SAMPLED_TOGETHER,
    STAGES,
    JudgedRows,
    LogprobsResult,
    OpRequest,
    Region,
    SampleTokensRequest,
    SamplingBatch,
    SamplingRequest,
    StageInfo,
)


def stage_order(extra: Iterable[StageInfo]) -> tuple[str, ...]:
    """All stages in the order in which they run: each plugin's after the built-in one it names."""
    following: dict[str, list[str]] = {}
    for info in sorted(extra, key=lambda info: info.name):
        following.setdefault(info.after, []).append(info.name)
    return tuple(name for stage in STAGES for name in (stage, *following.get(stage, ())))


def sampling_requests(
    stages: Iterable[str], vocab_size: int, device_type: str, demands: frozenset[str], *, verify: bool = False
) -> dict[str, OpRequest]:
    """Slot name -> request for every stage, for ``logprobs``, and for ``verify`` if drafts may be rejected."""
    return {
        f"sampling_{stage}": SamplingRequest(
            stage=stage, vocab_size=vocab_size, device_type=device_type, demands=demands
        )
        for stage in (*stages, "logprobs", *(("verify",) if verify else ()))
    }


def sampling_region(vocab_size: int, device_type: str, demands: frozenset[str]) -> dict[str, Region]:
    """Slot name -> the region for steps that need few stages."""
    request = SampleTokensRequest(vocab_size=vocab_size, device_type=device_type, demands=demands)
    parts = tuple(f"sampling_{stage}" for stage in SAMPLED_TOGETHER)
    return {"sample_tokens": Region(request=request, replaces=parts, beside=True)}


@attrs.frozen(kw_only=True)
class LogprobRows:
    """Which of a step's sampled rows report log-probabilities.

    ``raw`` and ``processed`` are ``[N']`` int64 row numbers on the device; k the number of alternatives each.
    """

    raw: torch.Tensor | None = None
    raw_k: int = 0
    processed: torch.Tensor | None = None
    processed_k: int = 0


@attrs.define(kw_only=True)
class Sampled:
    """What N rows gave.

    Attributes:
        tokens: ``[N]`` int64; negative where no token could be drawn.
        logits: what they were drawn from. raw, processed: log-probabilities of the rows that asked.
        errors: row -> what a stage raised when it was given that row alone.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    errors: Mapping[int, str] = attrs.field(factory=dict)
    raw: LogprobsResult | None = None
    processed: LogprobsResult | None = None


class Sampler:
    """Stages and draw of one engine, taken from its operator table once."""

    def __init__(self, ops: Any, stages: Iterable[str]) -> None:
        self._stages = tuple((stage, getattr(ops, f"sampling_{stage}").run) for stage in stages if stage != "draw")
        self._draw = ops.sampling_draw.run
        self._logprobs = ops.sampling_logprobs.run
        verify = getattr(ops, "sampling_verify", None)
        self._verify = None if verify is None else verify.run
        region = getattr(ops, "sample_tokens", None)
        self._region = None if region is None else region.run

    def run(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        rows: LogprobRows,
        judged: JudgedRows | None = None,
        *,
        pads_only: bool = False,
    ) -> Sampled:
        """Sample ``[N, V]`` float32 logits, which may be overwritten; judge drafts by rejection where told to.

        Args:
            pads_only: if the mask is active, then for no more than ``batch.token_limit``.
        """
        if self._region is not None and judged is None and rows.processed is None:
            others = batch.active.difference(SAMPLED_TOGETHER)
            if not others or (pads_only and others == {"mask"}):
                kept = None if rows.raw is None else logits[rows.raw]
                return self._sampled(self._region(logits, batch), logits, kept, rows)
        kept = None if rows.raw is None else logits[rows.raw]
        logits = self.process(logits, batch)
        tokens = self._draw(logits, batch)
        if judged is not None:
            assert self._verify is not None
            tokens = self._verify(logits, batch, tokens, judged)
        return self._sampled(tokens, logits, kept, rows)

    def process(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 as the draw gets them; may overwrite its argument."""
        for stage, run in self._stages:
            if stage in batch.active:
                logits = run(logits, batch)
        return logits

    def draw(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N]`` int64 from what :meth:`process` gave."""
        tokens: torch.Tensor = self._draw(logits, batch)
        return tokens

    def run_apart(self, logits: torch.Tensor, batch: SamplingBatch, rows: LogprobRows) -> Sampled:
        """Sample row by row, after :meth:`run` raised: a row that makes a stage raise gets no token, others do.

        Every row is drawn; drafts count where they equal what was drawn."""
        kept = None if rows.raw is None else logits[rows.raw]
        tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
        errors: dict[int, str] = {}
        for row in range(logits.shape[0]):
            try:
                alone = self.run(logits[row : row + 1].clone(), _one_row(batch, row), LogprobRows())
            except Exception as error:
                errors[row] = f"a sampling stage raised {type(error).__name__}: {error}"
            else:
                tokens[row] = alone.tokens[0]
                logits[row] = alone.logits[0]
        return attrs.evolve(self._sampled(tokens, logits, kept, rows), errors=errors)

    def _sampled(
        self, tokens: torch.Tensor, logits: torch.Tensor, kept: torch.Tensor | None, rows: LogprobRows
    ) -> Sampled:
        """Tokens with the log-probabilities that were asked for; ``kept`` are the raw logits of those rows."""
        raw = processed = None
        if kept is not None:
            raw = self._logprobs(kept, tokens[rows.raw].clamp(min=0), rows.raw_k)
        if rows.processed is not None:
            processed = self._logprobs(logits[rows.processed], tokens[rows.processed].clamp(min=0), rows.processed_k)
        return Sampled(tokens=tokens, logits=logits, raw=raw, processed=processed)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsResult:
        """Log-probabilities of given tokens (prompts)."""
        result: LogprobsResult = self._logprobs(logits, token_ids, k)
        return result


def _one_row(batch: SamplingBatch, row: int) -> SamplingBatch:
    return attrs.evolve(
        batch,
        slots=batch.slots[row : row + 1],
        positions=batch.positions[row : row + 1],
        grammar=None if batch.grammar is None else batch.grammar[row : row + 1],
    )
