"""Where experts lie: what a placement may say, and what the reference refuses to be built for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_support import operator

from deepinfer_core.api import BuildContext, ExpertParallelRequest, ExpertPlacement, ExpertShare, ProcessGroup
from deepinfer_core.plugins import request_from_data, request_to_data
from deepinfer_core.reference.expert_parallel import AllToAll


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        ([[0, 1], [2]], r"ranks have \[1, 2\] slots; give each as many, -1 for an empty one"),
        ([], "ranks have no slots"),
        ([[0, 1], [2, 3]], r"no such expert: \[3\]; there are 3"),
        ([[0, -1], [-1, 2]], r"nobody holds expert \[1\]"),
        ([[0, -2], [1, 2]], r"no such expert: \[-2\]"),
    ],
)
def test_a_placement_that_is_none_is_refused(slots: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExpertPlacement(experts=3, slots=slots)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "slots"),
    [
        (4, 1, 0, ((0, 1, 2, 3),)),
        (4, 2, 2, ((0, 1, 2), (3, 0, 1))),
        (6, 4, 0, ((0, 1), (2, 3), (4, 5), (0, 1))),
        (2, 4, 0, ((0,), (1,), (0,), (1,))),
    ],
)
def test_in_order_then_copies(experts: int, ranks: int, redundant: int, slots: Any) -> None:
    placement = ExpertPlacement.in_order(experts, ranks, redundant)
    assert (placement.slots, placement.ranks, placement.width) == (slots, ranks, len(slots[0]))
    assert ExpertShare(placement=placement, rank=ranks - 1).held == slots[-1]


REQUEST = ExpertParallelRequest(experts=4, top_k=2, hidden=8, dtype="float32", ranks=2, slots=3)


def test_the_request_is_plain_data() -> None:
    assert request_from_data(request_to_data(REQUEST)) == REQUEST


def test_without_a_group_it_is_not_built() -> None:
    with pytest.raises(ValueError, match="ranks=2: this process is in no group"):
        operator(REQUEST)


def built() -> AllToAll:
    handle: Any = None
    fields: dict[str, Any] = {"max_tokens": 8, "max_requests": 1, "max_model_len": 8, "num_threads": 1}
    context = BuildContext(
        device=torch.device("cpu"),
        settings=None,
        reference=operator,
        group=ProcessGroup(rank=0, size=2, handle=handle, device_type="cpu"),
        **fields,
    )
    return AllToAll(REQUEST, context)


@pytest.mark.parametrize(
    "placement",
    [ExpertPlacement.in_order(4, 2), ExpertPlacement.in_order(4, 3, 5), ExpertPlacement.in_order(5, 2, 1)],
    ids=["slots", "ranks", "experts"],
)
def test_a_placement_that_does_not_fit_is_refused(placement: ExpertPlacement) -> None:
    with pytest.raises(ValueError, match="the request says 4 experts on 2 ranks of 3"):
        built().place(placement)
