"""Text of a generation while it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .stop_strings import StopMatcher
from .tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the output tokens of one request into text, piece by piece, and finds its stop strings.

    The pieces are final: joined they are ``tokenizer.decode`` of all tokens, cut at the stop string. A character
    appears with the token that completes it, U+FFFD for invalid bytes as soon as they are known to be invalid, and
    for a character that was cut only in :meth:`finish`. Time is linear in the number of tokens, whatever they are.

    How stop strings match is written at :class:`~deepinfer_core.tokenizer.stop_strings.StopMatcher`. In addition, a
    special token that ``skip_special_tokens`` hides matches if its text is itself one of the stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """``min_tokens``: a stop string completed before this many tokens were out does not count."""
        self._assembler = tokenizer.assembler()
        self._hidden: Mapping[int, str] = tokenizer.special_texts if skip_special_tokens else {}
        self._stop_texts = frozenset(stop)
        self._min_tokens = min_tokens
        self._matcher = StopMatcher(stop, include_stop=include_stop_str_in_output, first_token=min_tokens)
        self._pieces: list[str] = []
        self._num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with ``token_ids``, ``""`` once a stop string matched."""
        delta = ""
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self._num_tokens += 1
            delta += self._matcher.feed(self._visible(token_id), self._num_tokens)
        self._pieces.append(delta)
        return delta

    def finish(self) -> str:
        """What was held back, now that no token follows. May still set ``stopped``. A second call gives ``""``."""
        if self.stopped is not None:
            return ""
        delta = self._matcher.feed(self._assembler.flush(), self._num_tokens) + self._matcher.finish()
        self._pieces.append(delta)
        return delta

    @property
    def text(self) -> str:
        """Everything returned so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def stopped(self) -> str | None:
        """The stop string that matched."""
        return self._matcher.stopped

    @property
    def holds_back(self) -> bool:
        """Whether text waits that may yet become, or already contains, a stop string."""
        return self._matcher.holds_back

    @property
    def stop_token_count(self) -> int | None:
        """How many tokens the output keeps: up to the one that completed the match. None without a match."""
        return self._matcher.stop_token_count

    def _visible(self, token_id: int) -> str:
        hidden = self._hidden.get(token_id)
        if hidden is None:
            return self._assembler.push(token_id)
        if hidden in self._stop_texts and self._num_tokens >= self._min_tokens:
            return self._assembler.flush() + hidden
        return ""
