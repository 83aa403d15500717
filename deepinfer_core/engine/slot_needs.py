"""Which sampling work each slot needs, as arrays, so that a step asks in a few array operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import StageInfo

from .request import Sequence as RequestSequence
from .sampler import stage_order
from .sampling_params import SamplingParams

Array = np.ndarray[Any, Any]

NO_LOGPROBS, RAW, PROCESSED = 0, 1, 2
WHOLE_VOCABULARY = -1


def stages_needed(params: SamplingParams, *, bad_words: bool, masks_stops: bool) -> set[str]:
    """Names of the stages that change this request's logits, whatever the vocabulary is padded to."""
    needed = {
        "mask": bad_words
        or masks_stops
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None,
        "bias": bool(params.logit_bias),
        "penalties": params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1,
        "temperature": params.temperature not in (0.0, 1.0),
        "min_p": params.min_p > 0 and not params.is_greedy,
        "top_k": params.top_k > 0 and not params.is_greedy,
        "top_p": params.top_p < 1 and not params.is_greedy,
    }
    return {stage for stage, yes in needed.items() if yes}


def alternatives(wanted: int, vocab_size: int) -> int:
    """``logprobs`` as a count: -1 is the whole vocabulary."""
    return vocab_size if wanted == WHOLE_VOCABULARY else min(wanted, vocab_size)


@attrs.frozen(kw_only=True)
class SamplingNeeds:
    """Of a step's sampled rows: stages that some row needs, and the rows that report log-probabilities.

    ``raw_k`` and ``processed_k`` are the most alternatives that a row of the kind wants. ``pads_only``: no row needs
    the mask but for the padding of the vocabulary.
    """

    active: frozenset[str]
    pads_only: bool
    raw_rows: Array
    raw_k: int
    processed_rows: Array
    processed_k: int


class SlotNeeds:
    """Per-slot flags. ``pads``: the logits are wider than the tokenizer, so that every row masks."""

    def __init__(self, slots: int, *, vocab_size: int, pads: bool, extra: Sequence[StageInfo] = ()) -> None:
        self._order = stage_order(extra)
        self._extra = extra
        self._vocab_size = vocab_size
        self._pads = pads
        self._stages = np.zeros((len(self._order), slots), bool)
        self._masks = np.zeros(slots, bool)
        self._logprobs = np.zeros(slots, np.int8)
        self._k = np.zeros(slots, np.int64)
        self.any_prompt_logprobs = False
        self._asked = b""
        self._answer: SamplingNeeds | None = None

    def set(self, slot: int, sequence: RequestSequence) -> None:
        self._answer = None
        request = sequence.request
        params = request.params
        needed = stages_needed(
            params,
            bad_words=bool(request.bad_word_ids),
            masks_stops=params.min_tokens > 0 and bool(request.eos_token_ids),
        )
        self._masks[slot] = "mask" in needed
        needed |= {"mask"} if self._pads else set()
        needed |= {i.name for i in self._extra if not i.arguments.keys().isdisjoint(dict(params.extra_args))}
        self._stages[:, slot] = [stage in needed for stage in self._order]
        mode = NO_LOGPROBS if params.logprobs is None else RAW if params.logprobs_mode == "raw" else PROCESSED
        self._logprobs[slot] = mode
        self._k[slot] = alternatives(params.logprobs or 0, self._vocab_size)
        self.any_prompt_logprobs |= params.prompt_logprobs is not None

    def of(self, slots: Array) -> SamplingNeeds:
        """What these slots need together. Decoding asks the same question step after step, so the last answer
        is kept until a slot changes hands."""
        key = slots.tobytes()
        if key != self._asked or self._answer is None:
            self._asked, self._answer = key, self._work_out(slots)
        return self._answer

    def read(self, slots: Array) -> SamplingNeeds:
        """The same, from slots of a step in flight: may be called while other slots change hands."""
        return self._work_out(slots)

    def _work_out(self, slots: Array) -> SamplingNeeds:
        flags = np.asarray(self._stages[:, slots].any(axis=1))
        modes = self._logprobs[slots]
        raw, processed = np.nonzero(modes == RAW)[0], np.nonzero(modes == PROCESSED)[0]
        return SamplingNeeds(
            active=frozenset(stage for stage, flag in zip(self._order, flags.tolist(), strict=True) if flag),
            pads_only=not self._masks[slots].any(),
            raw_rows=raw,
            raw_k=int(self._k[slots[raw]].max(initial=0)),
            processed_rows=processed,
            processed_k=int(self._k[slots[processed]].max(initial=0)),
        )

    def logprobs_of(self, slot: int) -> int:
        """Alternatives this slot reports."""
        return int(self._k[slot])
