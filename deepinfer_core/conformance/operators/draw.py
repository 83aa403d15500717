"""The draw: seeded noise that depends on nothing but seed, child, position and token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import attrs
import torch

from deepinfer_core.api import SAMPLED_TOGETHER, SampleTokensRequest, SamplingBatch, SamplingRequest
from deepinfer_core.conformance.case import Case, Mismatch
from deepinfer_core.conformance.compare import check_equal
from deepinfer_core.conformance.target import Target

from .checks import Session, session
from .listing import operation_cases
from .operation import Operation, Oracle, Put, Tensors, copies, generator, normal
from .sampling_rows import VOCAB, sampling_state, state_fields

REQUESTS = (
    {"seed": 0, "temperature": 1.0},
    {"seed": 2**63 + 12345, "temperature": 0.7},
    {"seed": 1, "child": 3, "temperature": 1.0},
    {"seed": 1, "temperature": 0.0},
    {"seed": 987654321, "child": 1, "temperature": 2.0},
)
GOLDEN = "golden_draws.json"
SAMPLES, CHANCE = 20000, 1e-9
"""Draws of the chi-square test, and the probability with which a right draw fails it."""


class Draw(Operation):
    """Tokens are exact: E and log E are float64 results rounded to float32, and what follows is one subtraction."""

    exact = True
    requests: Sequence[Mapping[str, Any]] = REQUESTS
    request: SamplingRequest | SampleTokensRequest

    def __init__(self, vocab: int = VOCAB) -> None:
        self.request = SamplingRequest(stage="draw", vocab_size=vocab)
        self.variant = "draw"

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        logits = normal(draw, rows, self.request.vocab_size, scale=2.0)
        logits[2::7] = logits[2::7].round().clamp(max=2.0)  # ties, also for the best
        logits[3::7, 5] = float("nan")
        logits[4::7, 9] = float("inf")
        logits[5::7] = float("-inf")
        logits[6::7, ::2] = float("-inf")
        positions = torch.randint(0, 4000, (rows,), generator=draw)
        positions[:1] = 2**31  # its counter does not fit one word
        slots = (torch.arange(rows) + 1 + torch.arange(rows) // 7) % len(
            self.requests
        )  # each kind of row meets each request
        return {"logits": logits, "slots": slots, "positions": positions}

    def constants(self, draw: torch.Generator) -> Mapping[str, Any]:
        return dict(state_fields(self.requests, self.request.vocab_size))

    def prepare(self, op: Any, constants: Mapping[str, Any], put: Put) -> Mapping[str, Any]:
        return {"state": sampling_state({name: put(value) for name, value in constants.items()})}

    def call(self, op: Any, inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        batch = SamplingBatch(
            state=weights["state"],
            slots=inputs["slots"],
            positions=inputs["positions"],
            token_limit=self.limit,
            active=self.active,
            max_position=2**31,
        )
        return {"tokens": op.run(inputs["logits"], batch)}

    active = frozenset({"draw"})

    @property
    def limit(self) -> int:
        return self.request.vocab_size

    overwritten = frozenset({"logits"})

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {"tokens": torch.int64}

    def expected(self, oracle: Oracle, inputs: Tensors, constants: Mapping[str, Any]) -> tuple[Tensors, Tensors]:
        """In float32, the arithmetic that defines a draw."""
        weights = self.prepare(None, constants, lambda tensor: tensor)
        outputs = self.call(
            oracle(attrs.evolve(self.request, device_type="cpu", demands=frozenset())), copies(inputs), weights
        )
        return outputs, {}


class SampleTokens(Draw):
    """The region of the temperature, top-k, top-p and the draw: tokens of the stages one after the other, in float32.

    Only where a sum of probabilities meets top-p to the last bits may they differ; these rows have none such.
    """

    requests = tuple(
        {**request, "top_k": top_k, "top_p": top_p}
        for request, top_k, top_p in zip(REQUESTS, (0, 9, 0, 40, 1000), (0.75, 1.0, 1.0, 0.5, 0.9), strict=True)
    )
    active = frozenset(SAMPLED_TOGETHER)
    overwritten = frozenset()

    def __init__(self, vocab: int = VOCAB) -> None:
        self.request = SampleTokensRequest(vocab_size=vocab)
        self.variant = ""

    @property
    def limit(self) -> int:
        """The last third of the ids is padding: never drawn."""
        return self.request.vocab_size * 2 // 3


class SampleFlatTokens(SampleTokens):
    """Rows of which top-p keeps thousands of tokens, some of them with few different logits."""

    requests = (
        {"seed": 5, "temperature": 1.0, "top_p": 0.9},
        {"seed": 2**63 + 1, "temperature": 0.7, "top_p": 0.6},
        {"seed": 77, "child": 2, "temperature": 1.6, "top_p": 0.95},
        {"seed": 9, "temperature": 1.0, "top_p": 0.5},
    )

    def __init__(self) -> None:
        super().__init__(vocab=30000)
        self.variant = "flat"

    def sample(self, rows: int, draw: torch.Generator) -> Tensors:
        logits = normal(draw, rows, self.request.vocab_size, scale=1.0)
        logits[1::4] = (logits[1::4] * 2).round()
        logits[2::4] *= 0.1
        logits[3::4] += 100.0  # the temperature makes equals of neighbours
        slots = (torch.arange(rows) + torch.arange(rows) // 4) % len(self.requests)
        return {"logits": logits, "slots": slots, "positions": torch.randint(0, 4000, (rows,), generator=draw)}


def _where_it_stands(target: Target) -> str:
    """A request's token is the same in any slot and any row, whatever stands beside it."""
    s = session(target, Draw())
    inputs = s.operation.sample(21, generator("stands"))
    first = s.call(inputs)["tokens"]
    order = torch.randperm(21, generator=generator("stands order"))
    check_equal(f"{s.label}, rows in another order", s.call(_taken(inputs, order))["tokens"], first[order], "as before")
    slots = torch.randperm(len(REQUESTS), generator=generator("stands slots"))
    moved = {name: value[slots] for name, value in s.constants.items()}
    weights = s.operation.prepare(s.chosen.operator, moved, target.put)
    elsewhere = Session(target=target, operation=s.operation, chosen=s.chosen, constants=moved, weights=weights)
    there = {**inputs, "slots": slots.argsort()[inputs["slots"]]}
    check_equal(f"{s.label}, requests in other slots", elsewhere.call(there)["tokens"], first, "as before")
    return s.chosen.label


def _taken(inputs: Tensors, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: value[rows] for name, value in inputs.items()}


def draw_flat(target: Target, draws: list[dict[str, int]], vocab: int) -> tuple[torch.Tensor, str]:
    """Tokens drawn from flat logits by requests with these seeds, children and positions; and who drew them."""
    chosen = target.choose(SamplingRequest(stage="draw", vocab_size=vocab, device_type=target.device.info.type))
    fields = state_fields([{"seed": d["seed"], "child": d["child"], "temperature": 1.0} for d in draws], vocab)

    def work() -> torch.Tensor:
        batch = SamplingBatch(
            state=sampling_state({name: target.put(value) for name, value in fields.items()}),
            slots=target.put(torch.arange(len(draws))),
            positions=target.put(torch.tensor([d["position"] for d in draws])),
            token_limit=vocab,
            active=frozenset({"draw"}),
            max_position=max(d["position"] for d in draws),
        )
        tokens: torch.Tensor = chosen.operator.run(target.put(torch.zeros(len(draws), vocab)), batch)
        return tokens

    return target.get(target.work(work)), chosen.label


def _golden(target: Target) -> str:
    """Tokens from flat logits, which are decided by the noise alone, against stored ones."""
    golden = json.loads(resources.files("deepinfer_core.conformance").joinpath(GOLDEN).read_text(encoding="utf-8"))
    found, label = draw_flat(target, golden["draws"], golden["vocab_size"])
    for number, draw in enumerate(golden["draws"]):
        if int(found[number]) != draw["token"]:
            raise Mismatch(
                f"sampling.stage[draw] by {label}, seed {draw['seed']}, child {draw['child']}, position "
                f"{draw['position']}: found token {int(found[number])}, expected {draw['token']} (golden vector)"
            )
    return label


def _chi_square(target: Target) -> str:
    """Draws of many seeds have the distribution of the softmax."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])
    chosen = target.choose(SamplingRequest(stage="draw", vocab_size=8, device_type=target.device.info.type))
    fields = state_fields([{"seed": seed * 7919 + 1, "temperature": 1.0} for seed in range(200)], 8)

    def work() -> torch.Tensor:
        rows = torch.arange(SAMPLES)
        batch = SamplingBatch(
            state=sampling_state({name: target.put(value) for name, value in fields.items()}),
            slots=target.put(rows % 200),
            positions=target.put(rows // 200),
            token_limit=8,
            active=frozenset({"draw"}),
            max_position=SAMPLES // 200,
        )
        tokens: torch.Tensor = chosen.operator.run(target.put(logits.expand(SAMPLES, 8).contiguous()), batch)
        return tokens

    counts = torch.bincount(target.get(target.work(work)), minlength=8).double()
    expected = SAMPLES * logits.double().softmax(0)
    statistic = ((counts - expected).square() / expected).sum()
    chance = float(torch.special.gammaincc(torch.tensor(3.5, dtype=torch.float64), statistic / 2))
    if chance < CHANCE:
        raise Mismatch(
            f"sampling.stage[draw] by {chosen.label}: {SAMPLES} draws gave counts {counts.long().tolist()}, expected "
            f"{expected.round().long().tolist()}; chance of that {chance:.1e}, tolerance {CHANCE:.0e}"
        )
    return chosen.label


def cases(dtype: str) -> Iterator[Case]:
    """Every case of the draw."""
    yield from operation_cases(Draw, dtype="float32", without=("extremes", "broken_rows"))
    for name, check in (
        ("wherever_it_stands", _where_it_stands),
        ("golden_vectors", _golden),
        ("chi_square", _chi_square),
    ):
        yield Case(
            id=f"sampling.stage[draw]/float32/{name}", family="sampling", tier="boots", check=check, required=True
        )
