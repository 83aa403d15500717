"""Rejection of drafts: token by token as the definition has it, and in distribution as if nothing had been drafted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from deepinfer_core.api import JudgedRows, SamplingBatch, SamplingRequest
from deepinfer_core.conformance.case import Case, Mismatch
from deepinfer_core.conformance.compare import check_equal
from deepinfer_core.conformance.memory import check_guards, guard
from deepinfer_core.conformance.target import Target

from .draw import CHANCE, SAMPLES
from .operation import generator, normal
from .sampling_rows import sampling_state, state_fields

VOCAB, SLOTS = 40, 8


def _run(target: Target, op: Any, given: dict[str, torch.Tensor], host: bool = False) -> torch.Tensor:
    """Judge rows; tensors by name: logits, tokens, positions, slots, rows, drafts, and scores unless drafts were
    certain. ``host``: the definition's turn."""
    put = (lambda tensor: tensor) if host else target.put
    fields = state_fields([{"seed": 5 + seed, "temperature": 1.0} for seed in range(SLOTS)], given["logits"].shape[1])

    def work() -> torch.Tensor:
        on = {name: put(value) for name, value in given.items()}
        batch = SamplingBatch(
            state=sampling_state({name: put(value) for name, value in fields.items()}),
            slots=on["slots"],
            positions=on["positions"],
            token_limit=given["logits"].shape[1],
            active=frozenset({"draw"}),
            max_position=int(given["positions"].max()) if len(given["positions"]) else 0,
        )
        judged = JudgedRows(rows=on["rows"], drafts=on["drafts"], scores=on.get("scores"))
        kept = {"logits": guard(given["logits"], put), "tokens": guard(given["tokens"], put)}
        tokens: torch.Tensor = op.run(kept["logits"].tensor, batch, kept["tokens"].tensor, judged)
        check_guards("sampling.stage[verify]", kept, frozenset({"tokens"}), target.get)
        return tokens

    return work() if host else target.get(target.work(work))


def _judged(certain: bool, target: Target) -> str:
    """Some rows judged, some not, one whose draw failed; and none at all."""
    request = SamplingRequest(stage="verify", vocab_size=VOCAB, device_type=target.device.info.type)
    chosen = target.choose(request)
    oracle = target.oracle(SamplingRequest(stage="verify", vocab_size=VOCAB))
    for count in (0, 1, 60):
        draw = generator(f"verify {count} {certain}")
        rows = torch.arange(0, count, 2) if count > 1 else torch.arange(count)
        given = {
            "logits": normal(draw, count, VOCAB, scale=1.5),
            "tokens": torch.randint(0, VOCAB, (count,), generator=draw),
            "positions": torch.randint(0, 900, (count,), generator=draw),
            "slots": torch.arange(count) % SLOTS,
            "rows": rows,
            "drafts": torch.randint(0, VOCAB, (len(rows),), generator=draw),
        }
        given["tokens"][4:5] = -1
        if not certain:
            given["scores"] = normal(draw, len(rows), VOCAB, scale=1.5)
        expected = _run(target, oracle, given, host=True)
        check_equal(f"sampling.stage[verify] by {chosen.label}, tokens", _run(target, chosen.operator, given), expected)
    return chosen.label


def _distribution(target: Target) -> str:
    """Drafts drawn from d, judged against p: what comes out is distributed as p."""
    request = SamplingRequest(stage="verify", vocab_size=6, device_type=target.device.info.type)
    chosen = target.choose(request)
    p, d = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, -1.0, 1.0])
    rows = torch.arange(SAMPLES)
    drafts = torch.multinomial(d.softmax(0), SAMPLES, replacement=True, generator=generator("drafts"))
    given = {
        "logits": p.expand(SAMPLES, 6).contiguous(),
        "tokens": torch.zeros(SAMPLES, dtype=torch.int64),
        "positions": rows // SLOTS,
        "slots": rows % SLOTS,
        "rows": rows,
        "drafts": drafts,
        "scores": d.expand(SAMPLES, 6).contiguous(),
    }
    counts = torch.bincount(_run(target, chosen.operator, given), minlength=6).double()
    expected = SAMPLES * p.double().softmax(0)
    statistic = ((counts - expected).square() / expected).sum()
    chance = float(torch.special.gammaincc(torch.tensor(2.5, dtype=torch.float64), statistic / 2))
    if chance < CHANCE:
        raise Mismatch(
            f"sampling.stage[verify] by {chosen.label}: {SAMPLES} judged drafts gave counts {counts.long().tolist()}, "
            f"expected {expected.round().long().tolist()}; chance of that {chance:.1e}, tolerance {CHANCE:.0e}"
        )
    return chosen.label


def cases(dtype: str) -> Iterator[Case]:
    """Every case of the judge of drafts, which only speculation asks for."""
    for name, check in (
        ("judged_rows", partial(_judged, False)),
        ("certain_drafts", partial(_judged, True)),
        ("chi_square", _distribution),
    ):
        yield Case(
            id=f"sampling.stage[verify]/float32/{name}", family="sampling", tier="serves", check=check, required=False
        )
