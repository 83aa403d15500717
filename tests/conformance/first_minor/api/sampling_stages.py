"""Sampling stages that plugins add to the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .sampling import STAGES


@attrs.frozen(kw_only=True)
class StageArgument:
    """A number that requests may pass to a stage, in ``SamplingParams.extra_args``.

    ``off`` is the default and means that the stage leaves the request alone; ``low`` and ``high`` bound it.
    """

    off: float
    low: float
    high: float
    help: str = ""


@attrs.frozen(kw_only=True)
class StageInfo:
    """Declared by ``deepinfer_sampling_stages``: one more stage.

    The stage itself is a provider of ``sampling.stage`` for the request whose ``stage`` is this name. Its ``run``
    reads its arguments from ``batch.state.extra``, and is called only in steps where some row has one that is
    not off. It must leave rows alone whose arguments are off, bit for bit.

    Attributes:
        name: an identifier, unique among all stages.
        after: the built-in stage it follows. Stages after the same one run in the order of their names.
        arguments: name (unique among all stages) -> what it may be.
    """

    name: str
    after: str
    arguments: Mapping[str, StageArgument]

    def __attrs_post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in (*STAGES, "logprobs"):
            raise ValueError(f"stage name {self.name!r}: expected an identifier that is no built-in stage")
        if self.after not in STAGES or self.after == "draw":
            raise ValueError(f"stage {self.name!r}: after={self.after!r}: expected one of {', '.join(STAGES[:-1])}")
        if not self.arguments:
            raise ValueError(f"stage {self.name!r}: expected at least one argument, or no request could ask for it")
