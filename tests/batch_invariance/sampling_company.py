"""Rows of a sampling step with parameters of their own, and a stage's answers for them in any company."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from invariance import check_company, normal

from deepinfer_core.api import JudgedRows, SamplingBatch, SamplingState


@attrs.frozen
class Sizes:
    """``vocab`` is no multiple of a vector's width; ``length``: tokens of history."""

    vocab: int = 1003
    length: int = 12


STAGES = Sizes()


def state_of(rows: int, seed: int) -> SamplingState:
    """One slot a row, every parameter on for some rows and off for others."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (rows,), generator=generator)]

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, STAGES.vocab, shape, generator=generator)

    return SamplingState(
        history=ids(rows, STAGES.length + 1).to(torch.int32),
        prompt_len=torch.full((rows,), STAGES.length // 2, dtype=torch.int64),
        temperature=pick(0.0, 1.0, 0.7, 1.9),
        min_p=pick(0.0, 0.05, 0.3),
        top_p=pick(1.0, 0.9, 0.5, 0.99),
        top_k=pick(0, 1, 7, 500, dtype=torch.int64),
        presence=pick(0.0, 0.7),
        frequency=pick(0.0, 0.3),
        repetition=pick(1.0, 1.2),
        seed_lo=torch.randint(0, 2**32, (rows,), generator=generator),
        seed_hi=torch.randint(0, 2**32, (rows,), generator=generator),
        child=pick(0, 1, 5, dtype=torch.int64),
        min_end=pick(0, STAGES.length + 5, dtype=torch.int64),
        stop_ids=ids(rows, 2),
        bias_ids=torch.stack([torch.randperm(STAGES.vocab, generator=generator)[:3] for _ in range(rows)]),
        bias_values=normal(rows, 3, seed=seed),
        bad_words=ids(rows, 1, 1),
        allowed=None,
    )


def check_stage(op: Any, name: str, rows: int, seed: int) -> None:
    """Every row of the stage's answer has the same bits whatever other rows are sampled beside it."""
    state, logits = state_of(rows, seed), normal(rows, STAGES.vocab, seed=seed) * 3
    ids = torch.randint(0, STAGES.vocab, (rows,), generator=torch.Generator().manual_seed(seed))

    def run(picked: Any) -> Any:
        if name == "logprobs":
            found = op.run(logits[picked], ids[picked], 5)
            return found.chosen, found.rank, found.top_ids, found.top
        slots = torch.tensor(picked, dtype=torch.int64)
        batch = SamplingBatch(
            state=state,
            slots=slots,
            positions=torch.full((len(slots),), STAGES.length, dtype=torch.int64),
            token_limit=STAGES.vocab,
            active=frozenset({name}),
            max_position=STAGES.length,
        )
        if name == "verify":
            return op.run(logits[slots], batch, ids[slots], judged_of(slots))
        return op.run(logits[slots].clone(), batch)

    def judged_of(slots: torch.Tensor) -> JudgedRows:
        """Two rows of three are judged, by the row's own number."""
        rows = (slots % 3 > 0).nonzero()[:, 0]
        mine = slots[rows]
        return JudgedRows(
            rows=rows, drafts=(ids[mine] + mine) % STAGES.vocab, scores=logits[mine] + 1.0 / (1 + mine[:, None])
        )

    check_company(run, rows, seed)
