"""Steps over paged caches: which requests have which rows, and where those lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from deepinfer_core.api import StepLayout

BLOCK = 16
SPARE = 3
"""Blocks of the pool that belong to no request: whatever is in them must stay, and must not be read."""

Put = Callable[[torch.Tensor], torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """A step of requests that have ``queries[r]`` new rows at the end of ``contexts[r]`` tokens.

    Attributes:
        table: ``[R, B]`` int32 block table of the whole pool, shuffled. num_blocks: of the pool, null block included.
        drop: how many leading blocks of each request slid out of a window: 0 in the table the operator sees.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    block_size: int
    table: torch.Tensor
    num_blocks: int
    drop: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.queries)

    @property
    def owners(self) -> torch.Tensor:
        """``[T]`` int64: request of each row."""
        return torch.repeat_interleave(torch.arange(len(self.queries)), torch.tensor(self.queries, dtype=torch.int64))

    @property
    def positions(self) -> torch.Tensor:
        """``[T]`` int64."""
        spans = [torch.arange(c - q, c) for q, c in zip(self.queries, self.contexts, strict=True)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    @property
    def slots(self) -> torch.Tensor:
        """``[T]`` int64: where each row is written."""
        position = self.positions
        block = self.table[self.owners, position // self.block_size].to(torch.int64)
        return block * self.block_size + position % self.block_size

    def layout(self, put: Put = lambda tensor: tensor) -> StepLayout:
        """As the engine hands it to operators."""
        table = self.table.clone()
        for request, count in enumerate(self.drop):
            table[request, :count] = 0
        lens = [int(n) for n in self.queries]
        return StepLayout(
            block_size=self.block_size,
            cu_seqlens=put(torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)),
            seq_lens=put(torch.tensor(self.contexts, dtype=torch.int32)),
            positions=put(self.positions),
            block_table=put(table),
            slot_mapping=put(self.slots),
            host_query_lens=np.array(lens, dtype=np.int32),
            host_seq_lens=np.array(self.contexts, dtype=np.int32),
            max_query_len=max(lens, default=0),
            max_seq_len=max(self.contexts, default=0),
        )

    def whole(self) -> Step:
        """The step that wrote every token of these requests, nothing dropped."""
        return attrs.evolve(self, queries=self.contexts, drop=(0,) * len(self.contexts))

    def before(self) -> Step:
        """The step that wrote all tokens before this one's."""
        past = tuple(c - q for q, c in zip(self.queries, self.contexts, strict=True))
        return attrs.evolve(self, queries=past, contexts=past, drop=(0,) * len(past))

    def alone(self, request: int) -> Step:
        """One request of the step by itself, in the same pool."""
        return attrs.evolve(
            self,
            queries=self.queries[request : request + 1],
            contexts=self.contexts[request : request + 1],
            table=self.table[request : request + 1],
            drop=self.drop[request : request + 1],
        )

    def rows_of(self, request: int) -> slice:
        start = sum(self.queries[:request])
        return slice(start, start + self.queries[request])


def make_step(
    requests: Sequence[tuple[int, int]], draw: torch.Generator, *, block_size: int = BLOCK, window: int | None = None
) -> Step:
    """A step of ``(new rows, tokens of context after them)``, over blocks in shuffled order.

    ``window``: blocks that no row of the step can see any more are taken out of the table.
    """
    queries, contexts = tuple(q for q, _ in requests), tuple(c for _, c in requests)
    needed = [-(-context // block_size) for context in contexts]
    total = sum(needed) + SPARE
    pool = torch.randperm(total, generator=draw) + 1
    table = torch.zeros((len(queries), max(needed, default=0)), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(needed):
        table[row, :count] = pool[taken : taken + count].to(torch.int32)
        taken += count
    drop = tuple(0 if window is None else max(0, c - q - window + 1) // block_size for q, c in requests)
    return Step(queries=queries, contexts=contexts, block_size=block_size, table=table, num_blocks=total + 1, drop=drop)


DECODE = ((1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 40), (1, 100))
PREFILL = ((1, 1), (7, 7), (16, 16), (33, 33))
CHUNKS = ((5, 21), (16, 32), (3, 20))
MIXED = ((1, 30), (1, 5), (4, 36), (9, 41), (20, 20))
LONG = ((1, 300), (40, 290))
VERIFY = ((4, 9), (3, 35), (6, 64), (1, 12))
