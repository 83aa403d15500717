"""Products with listed rows of a matrix, read where they lie: each list on its own, with no sum over two of them.

torch's sampled product computes one inner product for each listed row, and its bag of embeddings adds a list's rows in
order. Neither depends on how many lists there are, nor on threads.
"""

from __future__ import annotations

import warnings
from typing import Any

import attrs
import numpy as np
import torch

from .key_lists import Ids


@attrs.frozen(eq=False)
class Lists:
    """Equally long lists: list i names rows ``columns[i * width : (i + 1) * width]``.

    ``pattern``: the same as CSR ``[lists, rows of the matrix]``; its values are 0, or -inf where a list has no more.
    ``offsets``: where each begins.
    """

    pattern: torch.Tensor
    columns: torch.Tensor
    offsets: torch.Tensor
    width: int

    def products(self, left: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
        """``scale * <left[i], matrix[row]>`` for the rows of list i, -inf past its end: ``[lists, width]``."""
        return sampled(self.pattern, left, matrix, scale).view(-1, self.width)

    def weighted(self, matrix: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``sum_j weights[i, j] * matrix[row j]`` over list i, in order: ``[lists, d]``, fresh memory."""
        flat = weights.reshape(-1)
        summed: torch.Tensor = torch.embedding_bag(matrix, self.columns, self.offsets, False, 0, False, flat)[0]
        return summed


def sampled(pattern: torch.Tensor, left: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
    """The pattern's values plus ``scale * <left[i], matrix[column]>``, flat.

    torch refuses lists longer than the pattern is wide, so that a small matrix gets rows that no list names.
    """
    rows = matrix[: pattern.shape[1]]
    if rows.shape[0] < pattern.shape[1]:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, pattern.shape[1] - rows.shape[0]))
    found: torch.Tensor = torch.sparse.sampled_addmm(pattern, left, rows.t(), beta=1.0, alpha=scale).values()
    return found


def lists_of(rows: Ids, past_end: Any, heads: int) -> Lists:
    """Lists of ``rows [n, width]``, each ``heads`` times; ``past_end [n, width]`` is True where a list has ended.

    What stands past an end must be a row that the list may read: it is read, and counts nothing.
    """
    n, width = rows.shape
    highest = max(int(rows.max(initial=0)) + 1, width)
    index: Any = np.int32 if max(highest, n * heads * width) < 2**31 else np.int64
    columns = torch.from_numpy(np.repeat(rows.astype(index)[:, None], heads, axis=1).reshape(-1))
    mask = np.where(past_end, np.float32(-np.inf), np.float32(0))
    offsets = torch.from_numpy(np.arange(0, n * heads * width + 1, width, dtype=index))
    pattern = torch.sparse_csr_tensor(
        offsets,
        columns,
        torch.from_numpy(np.repeat(mask[:, None], heads, axis=1).reshape(-1)),
        size=(n * heads, highest),
        check_invariants=False,
    )
    return Lists(pattern, columns, offsets[:-1], width)


def expect_sparse_tensors() -> None:
    """Use up torch's once-a-process remark that CSR tensors are young: nothing here depends on what may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1), check_invariants=False)
