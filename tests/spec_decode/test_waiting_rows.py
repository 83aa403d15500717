"""Rows that wait leave what a draft may read as rows absorbed at once would, and no more of them are kept than that."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from deepinfer_spec_decode.waiting import WaitingRows, last_of_each

from deepinfer_core.api import ModelBatch, StepLayout

BLOCK, BLOCKS, WIDTH = 4, 12, 4


@attrs.define
class Owner:
    """A request: its blocks, and how many tokens of it were run."""

    blocks: list[int]
    length: int = 0


class Pool:
    """Requests that come, grow, take rows back, and go; blocks that are used again at once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.free = list(range(1, BLOCKS))
        self.owners: list[Owner] = []
        self.found: set[int] = set()
        self.made = 0

    def readable(self, group: str, blocks: Any) -> Any:
        assert group == "a"
        alive = self.found | {b for owner in self.owners for b in owner.blocks}
        return np.array([b in alive for b in blocks.tolist()])

    def step(self, drafting: str) -> tuple[Any, ModelBatch, list[torch.Tensor], list[Owner]]:
        """Some rows of each request, and the requests that are drafted for."""
        if self.owners and self.rng.random() < 0.15:
            gone = self.owners.pop(self.rng.randrange(len(self.owners)))
            kept = gone.blocks if self.rng.random() < 0.3 else []
            self.found |= set(kept)
            self.free += [b for b in gone.blocks if b not in kept]
        if self.found and self.rng.random() < 0.3:
            self.free.append(self.found.pop())
        if not self.free and not self.owners:
            self.free.append(self.found.pop())
        while self.free and (len(self.owners) < 2 or self.rng.random() < 0.2):
            self.owners.append(Owner([self.free.pop()]))
        places, ids = [], []
        for owner in self.owners:
            owner.length -= self.rng.randrange(min(3, owner.length) + 1)  # rejected drafts
            for _ in range(self.rng.choice([1, 1, 1, 6])):
                if owner.length == len(owner.blocks) * BLOCK:
                    if not self.free or len(owner.blocks) == WIDTH:
                        break
                    owner.blocks.append(self.free.pop())
                places.append(owner.blocks[owner.length // BLOCK] * BLOCK + owner.length % BLOCK)
                ids.append(self.made)
                owner.length += 1
                self.made += 1
        some = self.rng.randrange(1, len(self.owners) + 1)
        chosen = {"none": [], "few": self.owners[:1], "all": self.owners, "some": self.owners[:some]}[drafting]
        slots = torch.tensor(places, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int32)
        layout = StepLayout(
            block_size=BLOCK,
            cu_seqlens=none,
            seq_lens=none,
            positions=slots,
            block_table=none,
            slot_mapping=slots,
            host_query_lens=np.zeros(len(self.owners), np.int32),
            host_seq_lens=np.zeros(0, np.int32),
            max_query_len=0,
            max_seq_len=0,
        )
        made = torch.tensor(ids, dtype=torch.int64)
        batch = ModelBatch(token_ids=made, positions=made + 1, layouts={"a": layout}, caches={})
        table = np.zeros((len(chosen), WIDTH), np.int32)
        for row, owner in zip(table, chosen, strict=True):
            row[: len(owner.blocks)] = owner.blocks
        step = SimpleNamespace(
            host_anchors=np.zeros(len(chosen)),
            places={"a": np.array(places, np.int64)},
            tables={"a": table},
            readable=self.readable,
        )
        return step, batch, [made[:, None].double().repeat(1, 2)], chosen


def keep(cache: torch.Tensor, batch: ModelBatch, values: list[torch.Tensor]) -> None:
    """What a row leaves depends on all that waits: its token, its position, its value."""
    rows = torch.cat((values[0], batch.token_ids[:, None], batch.positions[:, None]), 1)
    cache[batch.layouts["a"].slot_mapping] = rows


@pytest.mark.parametrize("limit", [0, 7 * 16, 10**6])
@pytest.mark.parametrize("least", [1, 16])
def test_what_a_draft_may_read_is_there(limit: int, least: int) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    at_once, later = (torch.full((BLOCKS * BLOCK, 4), torch.nan, dtype=torch.float64) for _ in range(2))
    pool, waiting = Pool(rng), WaitingRows(limit, least)
    for _ in range(400):
        step, batch, values, chosen = pool.step(rng.choice(["none"] * 6 + ["few", "all", "some"]))
        keep(at_once, batch, values)
        for rows, kept in waiting.due(step, batch, values):
            keep(later, rows, kept)
        for owner in chosen:
            read = [owner.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(owner.length)]
            torch.testing.assert_close(later[read], at_once[read], rtol=0, atol=0)
        if len(chosen) == len(pool.owners):
            assert waiting.count == 0


def test_no_more_is_kept_than_may_be_read() -> None:
    """However long nobody drafts: a place is kept once, and blocks that nobody reads are forgotten."""
    rng = random.Random(random.getrandbits(63))
    pool, waiting, absorbed, largest = Pool(rng), WaitingRows(10**9, least=8), 0, 0
    for _ in range(1000):
        step, batch, values, _ = pool.step("none")
        absorbed += len(waiting.due(step, batch, values))
        largest = max(largest, len(values[0]))
        # Looked through, at most half of what stays is dead; then as much again is taken before the next time.
        assert waiting.count <= 2 * (2 * BLOCKS * BLOCK + largest)
    assert absorbed == 0
    assert pool.made > 2000


@pytest.mark.parametrize("rows", [0, 5, 40])
def test_what_is_kept_stays_within_the_limit(rows: int) -> None:
    """Of values, 16 bytes a row, but for those of one step; what is over it is absorbed. Nothing is lost."""
    rng = random.Random(random.getrandbits(63))
    pool, waiting, given, absorbed = Pool(rng), WaitingRows(16 * rows), 0, 0
    for _ in range(300):
        step, batch, values, _ = pool.step("none")
        absorbed += sum(len(kept[0]) for _, kept in waiting.due(step, batch, values))
        given += len(values[0])
        assert waiting.count <= max(rows, len(values[0]))
    assert 0 < absorbed <= given


def test_a_step_without_rows_leaves_the_limit_as_it_is() -> None:
    """What a row weighs is known from such a step's values as well."""
    pool, waiting = Pool(random.Random(2)), WaitingRows(16 * 5, least=1)
    step, batch, values, _ = pool.step("none")
    while len(values[0]) < 6:
        step, batch, values, _ = pool.step("none")
    waiting.due(step, batch, values)
    assert waiting.count == len(values[0])
    step.places = {"a": step.places["a"][:0]}
    empty = attrs.evolve(
        batch,
        token_ids=batch.token_ids[:0],
        positions=batch.positions[:0],
        layouts={"a": attrs.evolve(batch.layouts["a"], slot_mapping=batch.layouts["a"].slot_mapping[:0])},
    )
    (absorbed,) = waiting.due(step, empty, [values[0][:0]])
    torch.testing.assert_close(absorbed[1][0], values[0])
    assert waiting.count == 0
    some = SimpleNamespace(
        **{**vars(step), "host_anchors": np.zeros(1), "tables": {"a": np.ones((1, WIDTH), np.int32)}}
    )
    empty.layouts["a"] = attrs.evolve(empty.layouts["a"], host_query_lens=np.zeros(3, np.int32))
    assert waiting.due(some, empty, [values[0][:0]]) == []  # few are drafted for, and nothing waits


def test_rows_said_to_lie_nowhere_are_not_kept() -> None:
    step, batch, values, _ = Pool(random.Random(1)).step("none")
    step.places["a"][1:] %= BLOCK
    waiting = WaitingRows()
    assert waiting.due(step, batch, values) == []
    assert waiting.count == 1


def test_only_the_last_row_of_a_place_is_written() -> None:
    slots = torch.tensor([9, 5, 9, 2, 5, 9])
    assert last_of_each(slots, 4).tolist() == [1, 1, 1, 2, 5, 9]
