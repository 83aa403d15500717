"""Experts on several processes: where each of them lies, and rows carried to them and back. Provisional until two
plugins use it.

Every process of the group holds some of the experts and brings rows of its own. Communication is collective: **all
processes call the same operators the same number of times, in the same order, also a process that has no rows.**
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import attrs

from .provider import OpRequest

if TYPE_CHECKING:
    import torch.distributed

    from .moe import MoeExchange

EMPTY = -1
"""A slot that holds no expert."""


@attrs.frozen(kw_only=True, eq=False)
class ProcessGroup:
    """The processes that share a model's experts, seen from one of them.

    Attributes:
        rank: of this process, from 0. size: how many there are.
        handle: a ``torch.distributed`` group of exactly these processes, ranks as here. A provider uses its
            collectives, or sets up a communication library of its own through it.
        device_type: torch type of the tensors that the handle's collectives take; ``"cpu"`` for a group over the host.
    """

    rank: int
    size: int
    handle: torch.distributed.ProcessGroup
    device_type: str


@runtime_checkable
class JoinsGroups(Protocol):
    """What a :class:`Device` has besides when its processes talk through a library of the vendor's. Optional.

    The conformance kit joins by it; where it is missing the group's collectives run over the host. The process's
    number on its machine is in the environment variable ``LOCAL_RANK`` before the device is opened.
    """

    def join(self, rank: int, size: int, init_method: str, timeout: float) -> ProcessGroup:
        """Meet the other processes, each calling this once.

        Args:
            init_method: of ``torch.distributed.init_process_group``.
            timeout: seconds after which a collective that somebody misses must fail.
        """
        ...


def _slots(value: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in value)


@attrs.frozen(kw_only=True)
class ExpertPlacement:
    """Which expert lies where. An expert in several slots is *redundant*: each of its rows goes to one of them, once.

    Attributes:
        experts: of the model, numbered from 0.
        slots: for each rank, the expert in each of its slots, or -1 for an empty one. All ranks have as many slots.

    Raises:
        ValueError: ranks of different widths, an expert that does not exist, or one that nobody holds.
    """

    experts: int
    slots: tuple[tuple[int, ...], ...] = attrs.field(converter=_slots)

    @slots.validator
    def _check(self, _: Any, value: tuple[tuple[int, ...], ...]) -> None:
        widths = sorted({len(row) for row in value})
        if len(widths) != 1:
            raise ValueError(f"slots: ranks have {widths or 'no'} slots; give each as many, {EMPTY} for an empty one")
        held = {expert for row in value for expert in row} - {EMPTY}
        unknown, missing = held - set(range(self.experts)), set(range(self.experts)) - held
        if unknown:
            raise ValueError(f"slots: no such expert: {sorted(unknown)}; there are {self.experts}")
        if missing:
            raise ValueError(f"slots: nobody holds expert {sorted(missing)}")

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def width(self) -> int:
        """Slots of each rank."""
        return len(self.slots[0])

    @classmethod
    def in_order(cls, experts: int, ranks: int, redundant: int = 0) -> ExpertPlacement:
        """Experts in order over the ranks, then copies of experts 0, 1, 2, ... in the slots that are left.

        ``redundant``: slots to add; more, if that fills the ranks evenly.
        """
        width = -(-(experts + redundant) // ranks)
        return cls(
            experts=experts,
            slots=[[(rank * width + slot) % experts for slot in range(width)] for rank in range(ranks)],
        )


@attrs.frozen(kw_only=True)
class ExpertShare:
    """One process's part of a model's experts: those in ``placement.slots[rank]``."""

    placement: ExpertPlacement
    rank: int

    @property
    def held(self) -> tuple[int, ...]:
        """The expert in each slot of this process, -1 for an empty one."""
        return self.placement.slots[self.rank]


@attrs.frozen(kw_only=True)
class ExpertParallelRequest(OpRequest):
    """Moves rows to experts on several processes and back.

    ``experts``, ``top_k``, ``hidden``, ``dtype`` as in :class:`MoeExchangeRequest`. ``ranks``: processes of the group;
    ``slots``: of each of them. A process brings up to ``BuildContext.max_tokens`` rows to a dispatch.
    """

    op: ClassVar[str] = "moe.expert_parallel"

    experts: int
    top_k: int
    hidden: int
    dtype: str
    ranks: int
    slots: int


class ExpertParallel(Protocol):
    """Built in every process of ``BuildContext.group``, with equal requests.

    The cap ``batch_invariant`` means that a token's sum has the same bits whatever rows are beside it, on however many
    processes, wherever the experts lie.
    """

    def place(self, placement: ExpertPlacement) -> MoeExchange:
        """The exchange for experts that lie like this.

        Called in every process with an equal placement: for each layer when weights are loaded, and again after
        experts have moved. Exchanges of one operator may share buffers: what ``dispatch`` returned holds until the next
        ``dispatch`` of the operator, and each dispatch is followed by its ``combine`` before the next.

        The exchange is a :class:`MoeExchange` whose rows come from all processes:

        * ``dispatch(x, ids, weights)``: this process's own rows; ``ids`` name experts of the model, not slots. Each
          pair of token and expert goes to one slot that holds the expert; which one is the operator's choice.
        * It returns the rows of all processes that go to this one's slots: those of one slot together, slots ascending,
          ``offsets [slots + 1]``; an empty slot has none. Within a slot in any order that repeats with the inputs.
        * ``combine(outputs, handle)`` returns ``[T, hidden]`` float32 for this process's own rows, each the sum of its
          ``top_k`` results, fresh memory. Nothing is multiplied: weights were applied before.

        Raises:
            ValueError: the placement does not fit the request.
        """
        ...
