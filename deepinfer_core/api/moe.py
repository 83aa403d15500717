"""Mixture of experts: choosing experts, and moving rows to where their weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


@attrs.frozen(kw_only=True)
class RouteRequest(OpRequest):
    """Which experts a token uses, and with what weight.

    Attributes:
        experts: how many there are. top_k: how many a token uses, all different.
        scoring: of logits: ``sqrtsoftplus`` is ``sqrt(log(1 + exp(logit)))``.
        normalise: divide the chosen scores by their sum.
        scale: multiplies the weights last.
        bias: True if ``run`` gets a bias that is added to the scores for the choice, never for the weights.
        given: True if ``run`` gets the choice itself (a table by token id) and computes weights only.
    """

    op: ClassVar[str] = "moe.route"

    experts: int
    top_k: int
    scoring: Scoring
    normalise: bool
    scale: float
    bias: bool = False
    given: bool = False


class Route(Protocol):
    """The router's decision."""

    def run(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route every row.

        Args:
            logits: ``[T, experts]`` float32.
            bias: ``[experts]`` float32, iff the request says so.
            given: ``[T, top_k]`` int64 expert ids, different within a row, iff the request says so.
            counts: ``[experts + 1]`` int64 or None: adds the rows sent to each expert, and in the last place the
                rows whose scores were all NaN.

        Returns:
            ids ``[T, top_k]`` int64 and weights ``[T, top_k]`` float32. Chosen by score descending, then id ascending;
            stored with ids ascending. A NaN score loses to all others and weighs 0; a row of NaN takes the lowest
            ids with equal weights. T may be 0. Capturable.
        """
        ...


@attrs.frozen(kw_only=True)
class MoeExchangeRequest(OpRequest):
    """Moves rows to experts and back. Dispatch and combine belong to one provider: what one packs the other knows.

    ``experts``: of the whole model; ``top_k``: rows each token becomes; ``hidden``: channels; ``dtype``: of the rows.
    """

    op: ClassVar[str] = "moe.exchange"

    experts: int
    top_k: int
    hidden: int
    dtype: str


@attrs.frozen(kw_only=True, eq=False)
class DispatchedRows:
    """Rows as the experts of this process get them.

    Attributes:
        rows: ``[N, hidden]``, those of one expert together, experts ascending.
        weights: ``[N]`` float32, of each row.
        offsets: ``[experts here + 1]`` int64: expert e owns rows ``offsets[e]:offsets[e+1]``; may be empty. Where
            experts lie on several processes, slots in place of experts (:class:`ExpertParallel`).
        handle: for :meth:`MoeExchange.combine`.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor
    handle: Any


class MoeExchange(Protocol):
    """Rows out to the experts, results back to their tokens."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchedRows:
        """``x [T, hidden]``, ``ids [T, top_k]`` and ``weights [T, top_k]`` of ``moe.route``. T may be 0."""
        ...

    def combine(self, outputs: torch.Tensor, handle: Any) -> torch.Tensor:
        """``[N, hidden]`` in the order dispatched -> ``[T, hidden]`` float32: each token's rows added up."""
        ...
