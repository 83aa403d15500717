"""Free text until a sequence of tokens appears, then a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .state import GrammarState, Row, TokenSets


def failure_function(pattern: Sequence[int]) -> list[int]:
    """Knuth, Morris and Pratt (1977): for each prefix, its longest proper suffix that is a prefix too."""
    failure = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = failure[matched - 1]
        matched += pattern[i] == pattern[matched]
        failure[i] = matched
    return failure


class TriggeredState:
    """Any token is legal until the trigger was written, overlaps included; after it the grammar begins.

    After the bound token the rest of the trigger is forced: what of it does not stand at the end of the text yet.
    """

    def __init__(
        self, trigger: Sequence[int], bound: int | None, grammar: Callable[[], GrammarState], sets: TokenSets
    ) -> None:
        self.trigger = tuple(trigger)
        self.bound = bound
        self.sets = sets
        self.ended_free = False
        self._failure = failure_function(self.trigger)
        self._free: list[tuple[int, bool]] = [(0, False)]  # after each free token: how much matched, and whether bound
        self._grammar = grammar()
        self._inside = 0

    @property
    def ended(self) -> bool:
        return self.ended_free or self._grammar.ended

    @property
    def in_grammar(self) -> bool:
        return self._free[-1][0] == len(self.trigger)

    @property
    def is_complete(self) -> bool:
        return self._grammar.is_complete if self.in_grammar else not self._free[-1][1]

    @property
    def is_finished(self) -> bool:
        return self._grammar.is_finished if self.in_grammar else self.ended_free

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if self.in_grammar:
                taken = self._grammar.accept(tokens[count:])
                self._inside += taken
                return count + taken
            if not self._accept_free(token):
                return count
        return len(tokens)

    def _accept_free(self, token: int) -> bool:
        matched, bound = self._free[-1]
        if self.ended_free or (bound and token != self.trigger[matched]):
            return False
        if token in self.sets.ends and not bound:
            self.ended_free = True
            return True
        while matched and token != self.trigger[matched]:
            matched = self._failure[matched - 1]
        matched += token == self.trigger[matched]
        self._free.append((matched, bound or token == self.bound))
        return True

    def rollback(self, count: int) -> None:
        inside = min(count, self._inside)
        self._grammar.rollback(inside)
        self._inside -= inside
        count -= inside
        if count and self.ended_free:
            self.ended_free = False
            count -= 1
        if count:
            del self._free[-count:]

    def forced(self, limit: int) -> Sequence[int]:
        matched, bound = self._free[-1]
        if self.in_grammar:
            return self._grammar.forced(limit)
        return self.trigger[matched:][:limit] if bound else ()

    def write(self, row: Row) -> None:
        matched, bound = self._free[-1]
        if self.in_grammar:
            self._grammar.write(row)
        elif bound:
            row[:] = 0
            one_bit(row, self.trigger[matched])
        else:
            row[:] = self.sets.real


def one_bit(row: Row, token: int) -> None:
    """Set a token's bit."""
    row.view("uint32")[token // 32] |= 1 << (token % 32)
