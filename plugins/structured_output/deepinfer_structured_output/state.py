"""The state of one completion, over whichever library matches its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np

from deepinfer_core.api import Vocabulary

Row = np.ndarray[Any, np.dtype[np.int32]]


class Matcher(Protocol):
    """A library's matcher, without the end-of-sequence token: that one is counted here."""

    library: ClassVar[str]

    def take(self, tokens: list[int]) -> int:
        """Consume tokens up to the first illegal one; how many were consumed."""
        ...

    def back(self, count: int) -> None:
        """Unconsume."""
        ...

    def write(self, row: Row) -> None:
        """Legal tokens after what was consumed; end-of-sequence ids iff it is complete."""
        ...

    def is_complete(self) -> bool: ...

    def is_finished(self) -> bool:
        """Complete, and nothing can follow."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must follow; :meth:`write` sets the bit of the first one alone."""
        ...


@attrs.frozen(kw_only=True)
class TokenSets:
    """Bit masks as wide as the logits: ``text`` has ids that stand for text and the ends, ``real`` all there are."""

    ends: frozenset[int]
    text: Row
    real: Row
    is_text: np.ndarray[Any, np.dtype[np.bool_]]

    @classmethod
    def of(cls, vocabulary: Vocabulary, tokens: Sequence[bytes]) -> TokenSets:
        words = -(-vocabulary.width // 32)
        real = np.zeros(words * 32, bool)
        real[: len(tokens)] = True
        is_text = real.copy()
        is_text[: len(tokens)] = [bool(token) for token in tokens]
        is_text[[*vocabulary.special_ids, *vocabulary.eos_token_ids]] = False
        text = is_text.copy()
        text[list(vocabulary.eos_token_ids)] = True
        return cls(ends=frozenset(vocabulary.eos_token_ids), text=_packed(text), real=_packed(real), is_text=is_text)


def _packed(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> Row:
    row: Row = np.packbits(bits, bitorder="little").view(np.int32)
    return row


class GrammarState:
    """A matcher and the end of the text. Also after :attr:`ended` it can be rolled back."""

    def __init__(self, matcher: Matcher, sets: TokenSets) -> None:
        self.matcher = matcher
        self.sets = sets
        self.ended = False

    @property
    def is_complete(self) -> bool:
        return self.ended or self.matcher.is_complete()

    @property
    def is_finished(self) -> bool:
        return self.ended or self.matcher.is_finished()

    def accept(self, tokens: Sequence[int]) -> int:
        if self.ended:
            return 0
        sets, legal = self.sets, list(tokens)
        first = next((i for i, token in enumerate(legal) if not sets.is_text[token]), len(legal))
        taken = self.matcher.take(legal[:first]) if first else 0
        if taken == first < len(legal) and legal[first] in sets.ends and self.matcher.is_complete():
            self.ended = True
            taken += 1
        return taken

    def rollback(self, count: int) -> None:
        if count and self.ended:
            self.ended = False
            count -= 1
        if count:
            self.matcher.back(count)

    def forced(self, limit: int) -> Sequence[int]:
        return () if self.ended else self.matcher.forced()[:limit]

    def write(self, row: Row) -> None:
        """The mask of the next token, into ``[ceil(width / 32)]`` int32."""
        self.matcher.write(row)
        row &= self.sets.text
