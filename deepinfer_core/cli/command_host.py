"""What the program does for commands of plugins, which import the interface only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .output import print_table

if TYPE_CHECKING:
    from deepinfer_core import LLM, SamplingParams
    from deepinfer_core.api import Choice


class ProgramHost:
    """``click.Context.obj`` of every command (:class:`deepinfer_core.api.CommandHost`)."""

    def open_llm(
        self, model: str, settings: Mapping[str, Any], wrap_op: Callable[[Choice, Any], Any] | None = None
    ) -> LLM:
        from deepinfer_core import LLM
        from deepinfer_core.config import load_config, override

        return LLM(model, config=override(load_config(), settings, source="command"), wrap_op=wrap_op)

    def sampling_params(self, **fields: Any) -> SamplingParams:
        from deepinfer_core import SamplingParams

        return SamplingParams(**fields)

    def print_table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        print_table(title, columns, rows)
