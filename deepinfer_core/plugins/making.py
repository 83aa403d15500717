"""What a plugin's ``LazyRef`` makes, or one line that says whose it is and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from deepinfer_core.api import DeepInferError, LazyRef, PluginError

from .failure import cause_line

T = TypeVar("T")


def guarded(what: str, plugin: str, target: LazyRef, make: Callable[[], T], methods: tuple[str, ...] = ()) -> T:
    """``make()``, which imports code of ``plugin`` and calls it.

    Args:
        what: names it for users: a setting with its value, or a kind of thing.
        methods: what the result must have.

    Raises:
        PluginError: it raised something that is none of our own errors, or made what lacks a method.
    """
    label = f"{what}: {target.target} of plugin {plugin!r}"
    made = blamed(label, make)
    missing = [name for name in methods if not callable(getattr(made, name, None))]
    if missing:
        raise PluginError(f"{label}: made {type(made).__name__}, which lacks {', '.join(missing)}()")
    return made


def blamed(label: str, call: Callable[[], T]) -> T:
    """``call()``, which runs a plugin's code.

    Raises:
        PluginError: beginning with ``label``, for what it raised that is none of our own errors, ``SystemExit`` too.
    """
    try:
        return call()
    except (DeepInferError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(f"{label}: {cause_line(error)}") from error
