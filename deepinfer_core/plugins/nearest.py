"""The sentence that follows an unknown name: the nearest valid one, then all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_NAMES = 12


def suggest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'gemm.linear'? Known: ..."``, ready to be appended to an error."""
    names = sorted(set(known))
    if not names:
        return "; there are none"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    shown = ", ".join(names[:_MOST_NAMES]) + (f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else "")
    return f"; did you mean {near[0]!r}? Known: {shown}" if near else f"; known: {shown}"
