"""Memory that a failed step would keep: its tensors are local names of the functions in its traceback."""

from __future__ import annotations

import traceback


def release_memory(error: BaseException) -> None:
    """Forget the local names of all functions that ``error``, and what it arose from, ended.

    An error that a future handed over refers to itself by its traceback, so that its tensors would stay until the
    garbage collector comes: too late for a smaller step that is tried at once.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [one.__cause__, one.__context__]
