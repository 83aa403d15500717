"""Sampling stages: every row has parameters of its own, and one whose parameters are off passes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from deepinfer_core.api import SamplingBatch, SamplingRequest
from deepinfer_core.conformance.case import Case, Mismatch
from deepinfer_core.conformance.compare import same_bits
from deepinfer_core.conformance.target import Target
from deepinfer_core.conformance.tolerance import FUNCTION, U32, gamma, rounding

from .checks import MANY, session
from .listing import operation_cases
from .operation import Operation, Put, Tensors, generator, normal
from .sampling_rows import VOCAB, Request, bit_rows, sampling_state, state_fields

LIMIT = VOCAB - 3
"""Ids from here on are padding of the vocabulary."""

_TEXT = {"prompt": [5, 9, 9, 2, 40], "output": [7, 7, 7, 1, 9, 30, 31, 5]}

REQUESTS: Mapping[str, Sequence[Request]] = {
    "mask": (
        {**_TEXT},
        {**_TEXT, "stop_ids": [3, 8], "min_end": 12},
        {**_TEXT, "stop_ids": [11], "min_end": 6},
        {**_TEXT, "bad_words": [[4], [31, 5, 6], [99, 5, 7], [30, 31, 5]]},
        {**_TEXT, "allowed": [0, 1, 31, 32, 33, 64, 157, 158]},
        {**_TEXT, "allowed": []},
    ),
    "bias": ({**_TEXT}, {**_TEXT, "bias": {0: 3.5, 159: -2.25}}, {**_TEXT, "bias": {7: -100.0}}),
    "penalties": (
        {**_TEXT},
        {**_TEXT, "repetition": 1.7},
        {**_TEXT, "frequency": 0.3, "presence": 0.4},
        {**_TEXT, "frequency": -0.5},
        {"prompt": [3] * 13, "presence": 1.5, "repetition": 0.5},
    ),
    "temperature": tuple({**_TEXT, "temperature": t} for t in (1.0, 0.5, 2.0, 0.0, 1e-4, 1e-6, 5.0)),
    "min_p": tuple({**_TEXT, "min_p": p} for p in (0.0, 0.05, 0.5, 1.0)),
    "top_k": tuple({**_TEXT, "top_k": k} for k in (0, 1, 2, 7, 100, 160, 500)),
    "top_p": tuple({**_TEXT, "top_p": p} for p in (1.0, 0.9, 0.5, 0.01, 0.999)),
}
OFF: Mapping[str, int] = {"bias": 0, "penalties": 0, "temperature": 0, "min_p": 0, "top_k": 0, "top_p": 0}
"""Stage -> the request whose parameters leave it off."""


class Stage(Operation):
    """A stage from logits to logits. Rows take their requests' slots in turn, so several share one."""

    overwritten = frozenset({"logits"})
    spread: ClassVar[float] = 3.0

    def __init__(self, stage: str, variant: str = "") -> None:
        self.request = SamplingRequest(stage=stage, vocab_size=VOCAB)
        self.variant = variant or stage
        self.requests = REQUESTS[stage]

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        logits = normal(draw, rows, VOCAB, scale=self.spread)
        logits[::3] = (logits[::3] * 2).round() / 2  # ties
        logits[2::7, ::5] = float("-inf")
        slots = torch.arange(rows) % len(self.requests)
        positions = 13 - torch.arange(rows) // len(self.requests) % 4  # drafts stand at earlier positions
        return {"logits": logits, "slots": slots, "positions": positions}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        return dict(state_fields(self.requests))

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"state": sampling_state({name: put(value) for name, value in constants.items()})}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        return {"logits": op.run(inputs["logits"], self.batch(inputs, weights))}

    def batch(self, inputs: Tensors, weights: Mapping[str, Any]) -> SamplingBatch:
        return SamplingBatch(
            state=weights["state"],
            slots=inputs["slots"],
            positions=inputs["positions"],
            token_limit=LIMIT,
            active=frozenset({self.request.stage}),
            max_position=13,
            grammar=inputs.get("grammar"),
        )

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"logits": torch.float32}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        """Stages that only remove tokens leave the others to the bit."""
        return {"logits": torch.zeros_like(expected["logits"])}


class Arithmetic(Stage):
    """Stages that compute: a few float32 roundings of numbers no larger than these."""

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        slots, logits = inputs["slots"], inputs["logits"].abs().nan_to_num(posinf=0.0)
        y = expected["logits"].abs().nan_to_num(posinf=0.0)
        size = logits * constants["repetition"][slots, None].clamp(min=1.0)
        size = size + constants["bias_values"].abs().sum(1)[slots, None]
        size = size + 13 * constants["frequency"][slots, None].abs() + constants["presence"][slots, None].abs()
        if self.request.stage == "temperature":
            peak = logits.amax(1, keepdim=True) if logits.shape[1] else logits
            size = size + (size + peak) / constants["temperature"][slots, None].clamp(min=1e-5)
        return {"logits": 4 * U32 * (size + y) + rounding(expected["logits"], torch.float32)}


class Grammar(Stage):
    """The mask stage with a bit mask for each row."""

    def __init__(self) -> None:
        super().__init__("mask", "mask,grammar")

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        allowed = [None if row % 3 == 0 else [row % 5, 31 + row % 3, 156, 157, 159] for row in range(rows)]
        return {**super().sample(rows, draw), "grammar": bit_rows(allowed, VOCAB)}


class Logprobs(Operation):
    """Natural logarithms of softmax at chosen and best tokens; order and ranks are those of the logits."""

    count = 5

    def __init__(self) -> None:
        self.request = SamplingRequest(stage="logprobs", vocab_size=VOCAB)
        self.variant = "logprobs"

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        logits = normal(draw, rows, VOCAB, scale=4.0)
        logits[::3] = logits[::3].round()  # ties
        logits[1::4, 3:7] = float("-inf")
        return {"logits": logits, "token_ids": torch.randint(10, VOCAB, (rows,), generator=draw)}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        found = op.run(inputs["logits"], inputs["token_ids"], self.count)
        return {"chosen": found.chosen, "rank": found.rank, "top_ids": found.top_ids, "top": found.top}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"chosen": torch.float32, "rank": torch.int64, "top_ids": torch.int64, "top": torch.float32}

    def bounds(self, inputs: Tensors, constants: Mapping[str, Any], expected: Tensors) -> Tensors:
        size = inputs["logits"].abs().nan_to_num(posinf=0.0).amax(1) if len(inputs["logits"]) else torch.zeros(0)
        off = gamma(VOCAB) + FUNCTION * U32 + 4 * U32 * size
        zero = {name: torch.zeros_like(expected[name]) for name in ("rank", "top_ids")}
        return {
            **zero,
            "chosen": off + rounding(expected["chosen"], torch.float32),
            "top": off[:, None] + rounding(expected["top"], torch.float32),
        }


def _off_rows(stage: str, target: Target) -> str:
    """A row whose request leaves the stage off passes through it bit for bit, NaN included."""
    operation = Arithmetic(stage)
    s = session(target, operation)
    inputs = dict(operation.sample(MANY, generator(f"off {stage}")))
    inputs["logits"][5, 3] = float("nan")
    outputs = s.call({name: value.clone() for name, value in inputs.items()})
    for row in range(MANY):
        if int(inputs["slots"][row]) == OFF[stage] and not same_bits(inputs["logits"][row], outputs["logits"][row]):
            raise Mismatch(f"{s.label}, row {row}: found other bits, expected the row as it came: its request is off")
    return s.chosen.label


_STAGES_OF_THE_EXAMPLE = ("mask", "bias", "penalties", "temperature", "min_p", "top_k", "top_p")


def _worked_example(target: Target) -> str:
    """The vector of ``api/sampling.py``, which tells this order of the stages from the others: id 0 alone is left."""
    request = {
        "prompt": [3],
        "output": [2, 2],
        "allowed": [0, 1, 2],
        "bias": {2: 3.0},
        "frequency": 1.0,
        "repetition": 2.0,
        "temperature": 0.5,
        "min_p": 0.05,
        "top_k": 3,
        "top_p": 0.88,
    }
    fields, labels = state_fields([request], 4), []
    logits = torch.tensor([[2.0, 1.0, 0.0, 9.0]])
    for stage in _STAGES_OF_THE_EXAMPLE:
        asked = SamplingRequest(stage=stage, vocab_size=4, device_type=target.device.info.type)
        chosen = target.choose(asked)
        labels.append(chosen.label)

        def work(logits: torch.Tensor = logits, op: Any = chosen.operator) -> torch.Tensor:
            batch = SamplingBatch(
                state=sampling_state({name: target.put(value) for name, value in fields.items()}),
                slots=target.put(torch.tensor([0])),
                positions=target.put(torch.tensor([3])),
                token_limit=4,
                active=frozenset(_STAGES_OF_THE_EXAMPLE),
                max_position=3,
            )
            result: torch.Tensor = op.run(target.put(logits), batch)
            return result

        logits = target.get(target.work(work))
    if logits.isfinite().tolist() != [[True, False, False, False]]:
        raise Mismatch(f"sampling.stage, all stages in order: found {logits.tolist()}, expected id 0 alone to be left")
    return labels[0]


def cases(dtype: str) -> Iterator[Case]:
    """Every case of the stages before the draw, and of log-probabilities."""
    removing = ("mask", "min_p", "top_k", "top_p")
    for stage in REQUESTS:
        make: Any = partial(Stage if stage in removing else Arithmetic, stage)
        yield from operation_cases(make, dtype="float32", without=("extremes",))
    yield from operation_cases(Grammar, dtype="float32", only=("odd_rows", "zero_rows", "results_kept"))
    yield from operation_cases(Logprobs, dtype="float32", without=("extremes", "broken_rows"))
    for stage in OFF:
        yield Case(
            id=f"sampling.stage[{stage}]/float32/off_rows",
            family="sampling",
            tier="boots",
            check=partial(_off_rows, stage),
            required=True,
        )
    yield Case(
        id="sampling.stage/float32/worked_example",
        family="sampling",
        tier="boots",
        check=_worked_example,
        required=True,
    )
