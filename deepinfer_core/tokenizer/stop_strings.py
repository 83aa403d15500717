"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.api import InvalidRequestError


class StopMatcher:
    """Passes text through until a stop string occurs in it, holding back what may yet become one.

    Which occurrence wins depends on the text alone, never on how it is cut into pieces: the one that starts first,
    and of those that start at the same character the longest. To keep that promise a match is not reported while
    another one that starts earlier, or is longer, may still complete: after ``"ab"`` with stops ``"ab"`` and
    ``"abc"`` one more character is awaited. Whichever wins, ``stop_token_count`` is the token that completed *it*,
    which then may lie before the last token fed. :meth:`finish` settles what is still open with the text there is.

    An occurrence completed by a token before number ``first_token`` (counted from 1) is not a match; its
    characters are ordinary text, and it does not keep a longer one from matching later.

    Work is linear in the text for given stop strings.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool, first_token: int) -> None:
        if "" in stop:
            raise InvalidRequestError("stop: an empty string would end every request at once; remove it")
        # Longest first, so that the first hit at a position is the one that wins.
        self._stops = sorted(set(stop), key=len, reverse=True)
        self._first_letters = {text[0] for text in self._stops}
        self._include_stop = include_stop
        self._first_token = first_token
        self._held = ""
        self._tokens: list[int] = []  # for each held character, the number of the token that completed it
        self.stopped: str | None = None
        self.stop_token_count: int | None = None

    @property
    def holds_back(self) -> bool:
        """Whether text waits for what follows it."""
        return bool(self._held)

    def feed(self, text: str, token_count: int) -> str:
        """Take ``text``, completed by token number ``token_count``; return what can no longer change."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        self._held += text
        self._tokens += [token_count] * len(text)
        return self._advance(final=False)

    def finish(self) -> str:
        """No more text comes: settle an open match and return what was held back."""
        return "" if self.stopped is not None else self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        start = 0
        while start < len(self._held):
            if self._held[start] in self._first_letters:
                if not final and self._may_grow(start):
                    break
                match = self._match_at(start)
                if match is not None:
                    return self._stop(start, match)
            start += 1
        certain = self._held[:start]
        self._held = self._held[start:]
        del self._tokens[:start]
        return certain

    def _may_grow(self, start: int) -> bool:
        """Whether a stop string longer than the text from ``start`` on begins with all of it."""
        length = len(self._held) - start
        return any(len(stop) > length and self._held.endswith(stop[:length]) for stop in self._stops)

    def _match_at(self, start: int) -> str | None:
        for stop in self._stops:
            if self._held.startswith(stop, start) and self._tokens[start + len(stop) - 1] >= self._first_token:
                return stop
        return None

    def _stop(self, start: int, match: str) -> str:
        end = start + len(match)
        self.stopped = match
        self.stop_token_count = self._tokens[end - 1]
        text = self._held[: end if self._include_stop else start]
        self._held = ""
        self._tokens = []
        return text
