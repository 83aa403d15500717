"""A case: one named question to a backend, and the ways it can end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from .target import Target

Tier = Literal["boots", "serves", "full"]
TIERS: tuple[Tier, ...] = ("boots", "serves", "full")
"""``boots``: a small dense model runs. ``serves``: dense models in every dtype and variant. ``full``: everything."""


class Mismatch(Exception):
    """The backend does not do what the contract says. The text names operator, position, found and expected."""


class Refused(Exception):
    """No provider takes the request; the text holds every candidate's reason."""


class NotApplicable(Exception):
    """The question does not arise: a cap is not claimed, or this machine cannot answer. The text says why."""


@attrs.frozen(kw_only=True)
class Case:
    """One question.

    Attributes:
        id: unique and stable: ``"pointwise.rms_norm/float32/odd_rows"``. Gap files name it.
        family: what ``--family`` selects: the operator's family, or ``hygiene``, ``refusals``, ``model``.
        tier: the lowest tier that asks it.
        check: asks. Returns a note (which provider answered); raises :class:`Mismatch`, :class:`Refused` or
            :class:`NotApplicable`; any other exception is a failure too.
        required: a refusal is a failure.
    """

    id: str
    family: str
    tier: Tier
    check: Callable[[Target], str]
    required: bool = False

    @property
    def operator(self) -> str:
        """The part before the first slash, variant cut off: ``"pointwise.rms_norm"``."""
        return self.id.partition("/")[0].partition("[")[0]


def asked(tier: Tier, wanted: Tier) -> bool:
    """True when a case of ``tier`` belongs to a run of tier ``wanted``."""
    return TIERS.index(tier) <= TIERS.index(wanted)
