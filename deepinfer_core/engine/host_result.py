"""A step's results on the host: all is fetched before any of it counts, so that a step whose results do not fit the
memory can still be lost as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import Device

from .host_logprobs import HostLogprobs
from .launched_step import StepResult

Array = np.ndarray[Any, Any]


@attrs.frozen
class HostResult:
    """What was drawn and what was asked about it.

    Attributes:
        device: what stays there: the step itself, and logits for rows without a token.
        tokens: ``[S]`` int64 of the sampled rows, below 0 where there is none; None: the step sampled nothing.
        prompts: one for each of ``device.prompts``.
        logprobs: sampled row -> its log-probabilities and the row of it there.
    """

    device: StepResult
    tokens: Array | None
    prompts: Sequence[HostLogprobs]
    logprobs: dict[int, tuple[HostLogprobs, int]]

    @classmethod
    def fetch(cls, device: Device, result: StepResult) -> HostResult:
        """Download all of it.

        Raises:
            Exception: whatever the device raises, as one whose memory is full.
        """
        prompts = [HostLogprobs.fetch(device, part) for part in result.prompts]
        sampled, needs = result.sampled, result.ready.needs
        if sampled is None:
            return cls(result, None, prompts, {})
        logprobs: dict[int, tuple[HostLogprobs, int]] = {}
        for rows, part in ((needs.raw_rows, sampled.raw), (needs.processed_rows, sampled.processed)):
            if part is not None:
                found = HostLogprobs.fetch(device, part)
                logprobs.update((row, (found, i)) for i, row in enumerate(rows.tolist()))
        return cls(result, device.download(sampled.tokens), prompts, logprobs)
