"""Requests' sampling parameters, written out as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepinfer_core.api import SamplingState

VOCAB, LENGTH = 160, 48

Request = Mapping[str, Any]
"""Parameters of one request; what is left out is off. ``prompt`` and ``output`` are lists of tokens."""

_COLUMNS: Mapping[str, tuple[Any, torch.dtype]] = {
    "temperature": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "top_p": (1.0, torch.float32),
    "top_k": (0, torch.int64),
    "presence": (0.0, torch.float32),
    "frequency": (0.0, torch.float32),
    "repetition": (1.0, torch.float32),
    "child": (0, torch.int64),
    "min_end": (0, torch.int64),
}


def state_fields(requests: Sequence[Request], vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Tensors of a :class:`SamplingState`, by field, on the host: slot i holds request i."""
    fields = {
        name: torch.tensor([request.get(name, off) for request in requests], dtype=dtype)
        for name, (off, dtype) in _COLUMNS.items()
    }
    seeds = [request.get("seed", 0) for request in requests]
    tokens = [[*request.get("prompt", ()), *request.get("output", ())] for request in requests]
    fields |= {
        "history": padded(tokens, 0, torch.int32, LENGTH),
        "prompt_len": torch.tensor([len(request.get("prompt", ())) for request in requests]),
        "seed_lo": torch.tensor([seed % 2**32 for seed in seeds]),
        "seed_hi": torch.tensor([seed >> 32 for seed in seeds]),
        "stop_ids": padded([request.get("stop_ids", ()) for request in requests], -1, torch.int64),
        "bias_ids": padded([list(request.get("bias", {})) for request in requests], -1, torch.int64),
        "bias_values": padded([list(request.get("bias", {}).values()) for request in requests], 0.0, torch.float32),
        "bad_words": _bad_words([request.get("bad_words", ()) for request in requests]),
    }
    if any("allowed" in request for request in requests):
        fields["allowed"] = bit_rows([request.get("allowed") for request in requests], vocab)
    return fields


def sampling_state(fields: Mapping[str, torch.Tensor]) -> SamplingState:
    """The record, of tensors that may lie anywhere."""
    return SamplingState(**{"allowed": None, **dict[str, Any](fields)})


def padded(rows: Sequence[Sequence[Any]], fill: Any, dtype: torch.dtype, width: int = 0) -> torch.Tensor:
    """Rows of different lengths as one tensor."""
    width = max(width, *(len(row) for row in rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype).view(len(rows), width)


def _bad_words(rows: Sequence[Sequence[Sequence[int]]]) -> torch.Tensor:
    count = max(len(row) for row in rows)
    length = max((len(word) for row in rows for word in row), default=0)
    table = torch.full((len(rows), count, length), -1, dtype=torch.int64)
    for index, row in enumerate(rows):
        for number, word in enumerate(row):
            table[index, number, length - len(word) :] = torch.tensor(list(word))
    return table


def bit_rows(rows: Sequence[Sequence[int] | None], vocab: int) -> torch.Tensor:
    """``[N, ceil(V/32)]`` int32: bit ``id % 32`` of word ``id // 32`` is set for allowed ids; None allows all."""
    words = np.zeros((len(rows), -(-vocab // 32)), dtype=np.uint32)
    for index, row in enumerate(rows):
        for token in range(vocab) if row is None else row:
            words[index, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))
