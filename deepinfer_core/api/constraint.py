"""Constraints: output that follows a grammar. Provisional until two plugins use it.

A request names what its text must look like (:class:`ConstraintSpec`). The engine lets a :class:`ConstraintCompiler`
compile it, in a thread of its own and before the request may run, and keeps one :class:`ConstraintState` for each
completion. The state knows the tokens that are committed and no others: the engine tells it of each one, asks for
masks of the rows about to be sampled, and never takes a token that a mask forbade.

Masks are ``int32`` rows of ``ceil(width / 32)`` words; bit ``id % 32`` of word ``id // 32`` is set iff the token is
allowed. ``width`` is that of the logits, which is often more than the tokenizer has ids: bits of ids without a
token, and of special tokens other than the end-of-sequence ones, are never set. End-of-sequence ids are set exactly
when the text so far is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .provider import LazyRef

if TYPE_CHECKING:
    import numpy as np

ConstraintKind = Literal["json", "json_object", "regex", "ebnf", "choice", "structural_tags"]


@attrs.frozen(kw_only=True)
class ConstraintSpec:
    """What a text must look like. Equal specs mean equal grammars.

    Attributes:
        kind: ``json``: a document that a JSON Schema (draft 2020-12) accepts; ``json_object``: any JSON object;
            ``regex``: the whole text matches; ``ebnf``: derived from the rule ``root``; ``choice``: one of some texts;
            ``structural_tags``: free text in which every tag's body follows the tag's schema.
        text: the schema, regular expression or grammar; for ``choice`` a JSON list of texts; for ``structural_tags``
            ``{"structures": [{"begin", "schema", "end"}, ...], "triggers": [text, ...]}``. JSON is normalised.
        trigger_token_ids: if any, text is free until it ends in these tokens, and the grammar begins after them.
        bound_token_id: after this token the rest of ``trigger_token_ids`` is forced.
    """

    kind: ConstraintKind
    text: str
    trigger_token_ids: tuple[int, ...] = ()
    bound_token_id: int | None = None

    @property
    def grammar(self) -> tuple[str, str]:
        """What is compiled, and cached: the spec without its trigger."""
        return self.kind, self.text


@attrs.frozen(kw_only=True)
class Vocabulary:
    """The tokens, as a compiler needs them.

    Attributes:
        width: columns of the logits.
        read_tokens: the text of each id of the tokenizer, in order, as bytes; ``b""`` where there is none. It costs
            a while, so call it when the first grammar is compiled, not before.
        special_ids: ids that stand for no text. eos_token_ids: those that end a text.
        encode: text -> ids, without anything added around it. May be called from any thread.
    """

    width: int
    read_tokens: Callable[[], Sequence[bytes]]
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]


class ConstraintState(Protocol):
    """Where one completion stands in its grammar. One thread at a time calls it, though not always the same one."""

    @property
    def is_complete(self) -> bool:
        """The text so far is a whole sentence of the grammar; false again after what followed made it incomplete."""
        ...

    @property
    def is_finished(self) -> bool:
        """It is complete, and nothing but the end can follow; also after an end-of-sequence token was accepted."""
        ...

    def accept(self, tokens: Sequence[int]) -> int:
        """Take tokens in order, up to the first that is not legal; returns how many were taken.

        An end-of-sequence id is legal when the text is complete, and nothing is legal after it.
        """
        ...

    def rollback(self, count: int) -> None:
        """Forget the last ``count`` tokens taken. Any number of them."""
        ...

    def forced(self, limit: int) -> Sequence[int]:
        """At most ``limit`` tokens that must follow, one after the other: each is the only bit of the mask at its
        place. Empty when there is a choice, or nothing may follow."""
        ...


@attrs.frozen(eq=False)
class MaskJob:
    """Rows to fill for one completion: ``row`` for the next token, and ``row + j`` for the one after ``drafts[:j]``.

    Rows after the first draft that is not legal, or that ends the text, are left as they are: nobody reads them.
    """

    state: ConstraintState
    row: int
    drafts: Sequence[int] = ()


class CompiledConstraint(Protocol):
    """A compiled grammar. Shared by requests and threads."""

    @property
    def nbytes(self) -> int:
        """Memory it holds, in bytes, as well as the compiler can tell."""
        ...

    def start(self, spec: ConstraintSpec) -> ConstraintState:
        """A state before the first token, for a spec with this grammar. Cheap."""
        ...


class ConstraintCompiler(Protocol):
    """Compiles grammars and fills masks."""

    def check(self, spec: ConstraintSpec) -> None:
        """Refuse at once what can be told without compiling; microseconds. Called from any thread.

        Raises:
            InvalidRequestError: names what cannot be enforced.
        """
        ...

    def compile(self, spec: ConstraintSpec) -> CompiledConstraint:
        """Called from worker threads, several at a time; must let other threads run.

        Raises:
            Exception: the grammar is invalid or too large; the text reaches the user.
        """
        ...

    def fill(self, jobs: Sequence[MaskJob], masks: np.ndarray[Any, Any]) -> None:
        """Fill rows of ``masks``, ``[N, ceil(width / 32)]`` int32, C-contiguous; states end as they were.

        Called while the device works: spend the time outside the interpreter. When it raises, the engine calls again
        with one job at a time, and ends the requests whose job raises alone.
        """
        ...

    def close(self) -> None:
        """The engine ends."""
        ...


@attrs.frozen(kw_only=True)
class ConstraintInfo:
    """Declared by ``deepinfer_constraints``: a compiler users name in ``structured_outputs.backend``.

    Attributes:
        factory: called with the plugin's settings (or None) and the :class:`Vocabulary`; returns a
            :class:`ConstraintCompiler`. Called when the first request with a grammar arrives.
        priority: of the compilers that are installed, ``"auto"`` takes the highest.
    """

    name: str
    help: str
    factory: LazyRef
    priority: int = 100
