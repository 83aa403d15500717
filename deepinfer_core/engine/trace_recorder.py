"""Writes a trace while the engine runs, from a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from deepinfer_core.api import ConfigError

from .block_hash import extend_keys
from .outputs import FinishReason
from .pump import Pump
from .step_timing import StepTiming
from .trace_file import Arrival, Finish, TraceHeader, TraceRecord, TraceStep, write_record

if TYPE_CHECKING:
    from .request import Request, Sequence

FLUSH_SECONDS = 1.0


@attrs.frozen
class _Prompt:
    """An arrival whose blocks have yet to be numbered."""

    arrival: Arrival
    root: bytes
    tokens: list[int]


_Item = TraceRecord | StepTiming | _Prompt


class TraceRecorder:
    """Turns what the loop tells into lines of a file.

    Args:
        path: file to write; what it held is lost.
        clock: the engine's clock; its reading now is the trace's zero.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, header: TraceHeader, clock: Callable[[], float]) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (the pump closes it)
        except OSError as error:
            raise ConfigError(f"logging.trace_file = {str(path)!r}: {error.strerror}") from None
        self._zero = clock()
        self._block_size = header.block_size
        self._numbers: dict[bytes, int] = {}
        self._flushed = 0.0
        self._pump: Pump[_Item] = Pump("trace", self._write, self._file.close)
        self._pump.put(header)

    def arrived(self, request: Request) -> None:
        params, prompt, zero = request.params, len(request.prompt_token_ids), self._zero
        arrival = Arrival(
            time=request.metrics.arrival - zero,
            id=request.request_id,
            prompt=prompt,
            max_tokens=request.max_len - prompt,
            n=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seeded=params.seed is not None,
            stops=len(params.stop) + len(params.stop_token_ids),
            priority=request.priority,
            tenant=request.tenant,
            deadline=None if request.deadline is None else request.deadline - zero,
            ttft_target=request.ttft_target,
            tpot_target=request.tpot_target,
        )
        self._pump.put(_Prompt(arrival, request.root_key, request.prompt_token_ids))

    def step(self, timing: StepTiming) -> None:
        self._pump.put(timing)

    def finished(self, sequence: Sequence, tokens: int, reason: FinishReason, now: float) -> None:
        self._pump.put(
            Finish(
                time=now - self._zero,
                id=sequence.request.request_id,
                child=sequence.child,
                output=tokens,
                reason=reason,
            )
        )

    def close(self) -> None:
        self._pump.close()

    # ---- in the pump's thread

    def _write(self, item: _Item) -> None:
        self._file.write(write_record(self._record(item)))
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def _record(self, item: _Item) -> TraceRecord:
        if isinstance(item, _Prompt):
            return self._numbered(item)
        if isinstance(item, StepTiming):
            return TraceStep(
                time=item.wait_end - self._zero,
                tokens=item.tokens,
                prefill=item.prefill,
                requests=item.requests,
                output=item.output_tokens,
                seconds=item.seconds,
            )
        return item

    def _numbered(self, item: _Prompt) -> Arrival:
        """Blocks by number of first appearance: the same chain of content keys as the prefix cache's."""
        tokens = np.array(item.tokens, np.int32)
        keys = extend_keys([], item.root, tokens, len(tokens), self._block_size)
        numbers = tuple(self._numbers.setdefault(key, len(self._numbers)) for key in keys)
        return attrs.evolve(item.arrival, blocks=numbers)
