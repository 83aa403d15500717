"""What every operator gave for the rows of a prompt: stand-ins in the operator table that keep digests.

A row is known by the tokens up to and with its own, so that the same row of another run, in another step, among other
rows, is recognised. Its results must be the same bits wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import attrs
import torch

from deepinfer_core.api import Choice, SamplingBatch, SamplingRequest

RECORDED = frozenset({"run", "add", "mix", "merge", "combine"})
"""Methods whose results have a row for each row of the step."""


@attrs.frozen
class Place:
    """One result in one row: the tokens up to the row, the slot, the number of the call, the number of the result."""

    prefix: bytes
    slot: str
    call: int
    part: int


@attrs.frozen
class Moved:
    """A result that was not what it was before.

    Attributes:
        position: of the row. order: of the call in its step.
        call: which of the slot's calls. calls: how many a step makes. layers: attention calls of a step.
    """

    position: int
    order: int
    slot: str
    op: str
    provider: str
    call: int
    calls: int
    layers: int

    @property
    def layer(self) -> str:
        """The layer, where the slot runs equally often in each; otherwise which of the slot's calls it was."""
        if self.layers and self.calls in (self.layers, 2 * self.layers, 2 * self.layers + 1):
            return str(min(self.call * self.layers // self.calls, self.layers - 1))
        return f"call {self.call + 1} of {self.calls}"


@attrs.define
class Recorder:
    """Keeps digests of what it sees first and compares what it sees later.

    Attributes:
        prompts: token ids; rows of requests that begin with one of them are watched.
        seen: digests of the first run. moved: differences of the later ones, in the order met.
    """

    prompts: Sequence[Sequence[int]]
    seen: dict[Place, bytes] = attrs.field(factory=dict)
    moved: list[Moved] = attrs.field(factory=list)
    compared: int = 0
    _rows: list[tuple[int, int, bytes]] = attrs.field(factory=list)
    _count: int = 0
    _order: int = 0
    _calls: dict[str, int] = attrs.field(factory=dict)
    _most_calls: dict[str, int] = attrs.field(factory=dict)
    _attention: frozenset[str] = frozenset()
    _vocab_size: int = 0
    _head: Choice | None = None
    _history: Any = None

    def wrap(self, choice: Choice, op: Any) -> Any:
        """The stand-in for an operator of the table."""
        if choice.op.startswith(("kv_layout.", "runner.slot", "runner.append")):
            return op
        if choice.op == SamplingRequest.op:
            self._vocab_size = choice.request["vocab_size"]
            return _WatchedStage(op, self)
        if choice.op in ("attention.paged", "attention.sparse"):
            self._attention |= {choice.slot}
        return _Watched(choice, op, self)

    def first(self) -> Moved | None:
        """The earliest difference: the lowest position, and the first call there."""
        found = min(self.moved, key=lambda m: (m.position, m.order), default=None)
        if found is None:
            return None
        layers = sum(self._most_calls.get(slot, 0) for slot in self._attention)
        return attrs.evolve(found, calls=self._most_calls[found.slot], layers=layers)

    def forget_differences(self) -> None:
        """Before the next run."""
        self.moved.clear()
        self.compared = 0

    def begin_step(self, history: torch.Tensor, row_slots: torch.Tensor, positions: torch.Tensor) -> None:
        """A step's rows, from what the runner asks the first operator of the step."""
        self._count, self._order, self._calls, self._head = len(positions), 0, {}, None
        self._history = history.cpu().numpy().copy()
        self._rows = self._watched(row_slots.tolist(), positions.tolist())

    def note_logits(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """The logits that sampling begins with, the head's work. Its rows are some of the step's, in another order."""
        head, self._head = self._head, None
        if head is None or self._history is None:
            return
        rows = self._watched(slots.tolist(), (positions - 1).tolist())
        if rows:
            self._note_rows(head, 0, 0, logits, rows)

    def _watched(self, slots: Sequence[int], positions: Sequence[int]) -> list[tuple[int, int, bytes]]:
        """(row, position, digest of the tokens up to it) of the rows whose request begins with a prompt watched."""
        found = []
        for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            past = self._history[slot]
            if any(list(past[: len(prompt)]) == list(prompt) for prompt in self.prompts):
                digest = blake2b(past[: position + 1].tobytes(), digest_size=12).digest()
                found.append((row, position, digest))
        return found

    def note(self, choice: Choice, results: Any) -> None:
        """Digest or compare one call's results."""
        call = self._calls.get(choice.slot, 0)
        self._calls[choice.slot] = call + 1
        self._most_calls[choice.slot] = max(self._most_calls.get(choice.slot, 0), call + 1)
        self._order += 1
        if choice.request.get("out_features") == self._vocab_size:
            self._head = choice
            return
        if not self._rows:
            return
        for part, tensor in enumerate(results if isinstance(results, tuple) else (results,)):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[0] == self._count:
                self._note_rows(choice, call, part, tensor, self._rows)

    def _note_rows(
        self, choice: Choice, call: int, part: int, tensor: torch.Tensor, watched: list[tuple[int, int, bytes]]
    ) -> None:
        rows = torch.tensor([row for row, _, _ in watched], device=tensor.device)
        data = tensor.index_select(0, rows).cpu().reshape(len(watched), -1)
        if not data.numel():
            return
        flat = data.contiguous().view(torch.uint8).numpy()
        for (_, position, prefix), values in zip(watched, flat, strict=True):
            place = Place(prefix, choice.slot, call, part)
            digest = blake2b(values.tobytes(), digest_size=12).digest()
            before = self.seen.setdefault(place, digest)
            self.compared += 1
            if before != digest:
                self.moved.append(
                    Moved(position, self._order, choice.slot, choice.op, choice.provider, call, call + 1, 0)
                )


class _Watched:
    """Has whatever the operator has; results of the methods that give rows are noted."""

    def __init__(self, choice: Choice, op: Any, recorder: Recorder) -> None:
        self._choice = choice
        self._op = op
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._op, name)
        if name not in RECORDED:
            return value
        choice, recorder = self._choice, self._recorder

        def noted(*arguments: Any, **named: Any) -> Any:
            if choice.op == "runner.input_ids":
                recorder.begin_step(*arguments, **named)
            results = value(*arguments, **named)
            recorder.note(choice, results)
            return results

        return noted


class _WatchedStage:
    """A sampling stage. What the first of a step begins with is noted."""

    def __init__(self, op: Any, recorder: Recorder) -> None:
        self._op = op
        self._recorder = recorder

    def run(self, logits: torch.Tensor, batch: Any, *more: Any) -> Any:
        if isinstance(batch, SamplingBatch):
            self._recorder.note_logits(logits, batch.slots, batch.positions)
        return self._op.run(logits, batch, *more)
