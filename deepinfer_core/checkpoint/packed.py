"""Weights in the packed blocks they are stored in, for operators that compute on those directly."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from deepinfer_core.api import WeightSource


@attrs.frozen(kw_only=True, eq=False)
class PackedTensor:
    """A tensor as stored.

    Attributes:
        data: uint8 ``[*shape[:-1], bytes per row]``, blocks in GGUF's layout. Read-only; memory-mapped unless rows
            had to be reordered.
        qtype: GGUF type in lower case, e.g. ``"q4_1"``, ``"f32"``.
        shape: logical shape in Hugging Face order.
    """

    data: npt.NDArray[np.uint8]
    qtype: str
    shape: tuple[int, ...]


@runtime_checkable
class PackedWeightSource(WeightSource, Protocol):
    """A weight source that can also hand out packed blocks."""

    def load_packed(self, name: str) -> PackedTensor:
        """The stored blocks of ``name``. Raises CheckpointError for an unknown name."""
        ...
