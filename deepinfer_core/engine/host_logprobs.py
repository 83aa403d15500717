"""Log-probabilities on the host: a step's are downloaded once, whatever the number of rows that want them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import Device, LogprobsResult

Array = np.ndarray[Any, Any]


@attrs.frozen
class HostLogprobs:
    """The fields of :class:`LogprobsResult` as arrays."""

    chosen: Array
    rank: Array
    top_ids: Array
    top: Array

    @classmethod
    def fetch(cls, device: Device, result: LogprobsResult) -> HostLogprobs:
        return cls(*map(device.download, (result.chosen, result.rank, result.top_ids, result.top)))
