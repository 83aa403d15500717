"""From the compilers that plugins declare to the grammars of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepinfer_core.api import ConstraintCompiler, ConstraintInfo, PluginError, Vocabulary
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import Registry, claimed, resolve
from deepinfer_core.tokenizer import Tokenizer

from .constraint import Constraints

if TYPE_CHECKING:
    from .planning import PlannedEngine

AUTO = "auto"


def choose_compiler(config: EngineConfig, registry: Registry) -> tuple[str, ConstraintInfo] | None:
    """The plugin and compiler that ``structured_outputs.backend`` means; None when it is ``auto`` and there is none.

    Raises:
        PluginError: nobody has the compiler that was named, or several are first and none is named.
    """
    wanted = config.structured_outputs.backend
    if wanted != AUTO:
        return resolve(registry, "constraint", wanted)
    found = [holder for holders in claimed(registry, "constraint").values() for holder in holders]
    best = max((info.priority for _, info in found), default=0)
    first = [(plugin, info) for plugin, info in found if info.priority == best]
    if len(first) > 1:
        lines = " or ".join(f'structured_outputs.backend = "{plugin}:{info.name}"' for plugin, info in sorted(first))
        raise PluginError(f"several plugins compile grammars; write one of: {lines}")
    return first[0] if first else None


def open_constraints(
    planned: PlannedEngine,
    tokenizer: Tokenizer | None,
    *,
    token_limit: int,
    eos_token_ids: Sequence[int],
    jumps: bool,
    clock: Callable[[], float],
) -> Constraints | str:
    """The grammars of an engine, or why it takes none; nothing is prepared before the first one is asked for.

    ``jumps``: steps may be given drafts.
    """
    chosen = planned.constraints
    if chosen is None:
        return "no loaded plugin compiles grammars: pip install deepinfer-structured-output"
    if tokenizer is None:
        return "the checkpoint has no tokenizer, so tokens have no text that a grammar could be about"
    if not tokenizer.has_token_bytes:
        return "this tokenizer's decoder gives tokens no text of their own, so a grammar cannot follow them"
    plugin, info = chosen
    ends = tuple(token for token in eos_token_ids if token < token_limit)
    vocabulary = Vocabulary(
        width=planned.spec.vocab_size,
        read_tokens=lambda: [
            b"" if token in tokenizer.special_ids else tokenizer.id_to_bytes(token) for token in range(token_limit)
        ],
        special_ids=frozenset(token for token in (*tokenizer.special_ids, *ends) if token < token_limit),
        eos_token_ids=ends,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )

    def make() -> ConstraintCompiler:
        compiler: ConstraintCompiler = info.factory.load()(planned.context_for(plugin).settings, vocabulary)
        return compiler

    return Constraints(
        make,
        width=planned.spec.vocab_size,
        token_limit=token_limit,
        eos_token_ids=ends,
        config=planned.config.structured_outputs,
        jump_forward=planned.config.structured_outputs.jump_forward if jumps and planned.verifies_rows else 0,
        clock=clock,
    )
