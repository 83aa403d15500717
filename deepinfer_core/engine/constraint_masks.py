"""Fills a step's grammar masks in a thread, while the device runs the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import structlog

from deepinfer_core.api import ConstraintCompiler, MaskJob

log = structlog.get_logger("deepinfer.constraints")

Masks = np.ndarray[Any, np.dtype[np.int32]]


class StepMasks:
    """Masks of one step's sampled rows: ``[N, ceil(V / 32)]``, all bits set in rows without a grammar.

    Attributes:
        errors: row -> why it has no mask; its bits are clear. To be read after :meth:`wait`.
    """

    def __init__(self, masks: Masks, errors: dict[int, str], filled: Future[None]) -> None:
        self.errors = errors
        self._masks = masks
        self._filled = filled

    def wait(self) -> Masks:
        """The masks, once they are filled."""
        self._filled.result()
        return self._masks


class MaskFiller:
    """Asks the compiler for masks. ``eos_token_ids`` are those that end a text."""

    def __init__(self, compiler: Callable[[], ConstraintCompiler], *, width: int, eos_token_ids: Sequence[int]) -> None:
        self._compiler = compiler
        self._words = -(-width // 32)
        ends = np.zeros(self._words * 32, bool)
        ends[list(eos_token_ids)] = True
        self._ends: Masks = np.packbits(ends, bitorder="little").view(np.int32)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deepinfer-masks")

    def start(self, jobs: Sequence[MaskJob], rows: int, *, without_eos: Sequence[MaskJob] = ()) -> StepMasks:
        """Begin to fill. Rows of ``without_eos`` close the end-of-sequence ids wherever another token is open."""
        masks = np.full((rows, self._words), -1, np.int32)
        errors: dict[int, str] = {}
        return StepMasks(masks, errors, self._thread.submit(self._fill, jobs, masks, errors, without_eos))

    def close(self) -> None:
        self._thread.shutdown()

    def _fill(
        self, jobs: Sequence[MaskJob], masks: Masks, errors: dict[int, str], without_eos: Sequence[MaskJob]
    ) -> None:
        compiler = self._compiler()
        try:
            compiler.fill(jobs, masks)
        except BaseException as error:  # native code raises what it likes
            log.warning("filling masks failed; trying each request alone", jobs=len(jobs), error=str(error))
            for job in jobs:
                self._fill_alone(compiler, job, masks, errors)
        for job in without_eos:
            rows = masks[job.row : job.row + 1 + len(job.drafts)]
            others = rows & ~self._ends
            rows[:] = np.where(others.any(axis=1, keepdims=True), others, rows)

    def _fill_alone(self, compiler: ConstraintCompiler, job: MaskJob, masks: Masks, errors: dict[int, str]) -> None:
        rows = range(job.row, job.row + 1 + len(job.drafts))
        masks[rows.start : rows.stop] = -1
        try:
            compiler.fill([job], masks)
        except BaseException as error:
            masks[rows.start : rows.stop] = 0
            errors.update(dict.fromkeys(rows, f"the grammar raised {type(error).__name__}: {error}"))
