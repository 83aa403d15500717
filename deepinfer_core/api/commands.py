"""Commands that plugins add to the ``deepinfer`` program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from .plan import Choice
from .provider import LazyRef


@attrs.frozen(kw_only=True)
class CommandInfo:
    """Declared by ``deepinfer_commands``. ``command`` names a ``click.Command``, imported when it is run.

    What the command may ask of the program is its context's ``obj``, a :class:`CommandHost`.
    """

    name: str
    help: str
    command: LazyRef


class CommandHost(Protocol):
    """The program, as a plugin's command sees it: ``click.Context.obj``. Provisional."""

    def open_llm(
        self, model: str, settings: Mapping[str, Any], wrap_op: Callable[[Choice, Any], Any] | None = None
    ) -> Any:
        """An ``LLM`` under the configuration of file and environment.

        Args:
            settings: dotted path -> value, above all other sources.
            wrap_op: gives what stands in the operator table for each operator, to watch it at work.

        Raises:
            DeepInferError: one clear line about what is wrong and how to mend it.
        """
        ...

    def sampling_params(self, **fields: Any) -> Any:
        """A ``SamplingParams``."""
        ...

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table on standard output, as the program's own commands print them."""
        ...
