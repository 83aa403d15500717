"""Notices what code opens: device files and libraries, from Python by the interpreter's own audit events, from native
code by the descriptors that are open afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random", "/dev/tty", "/dev/pts", "/dev/shm",
             "/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr")  # fmt: skip


class Watch:
    """From when it is made until :meth:`stop`. Audit hooks cannot be removed, so a process makes one."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._on = True
        self._before = _open_devices()
        sys.addaudithook(self._event)

    def stop(self) -> list[str]:
        """What was opened, each once: paths of devices, names of libraries, programs that were run."""
        self._on = False
        return list(dict.fromkeys([*self._events, *(path for path in _open_devices() if path not in self._before)]))

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or not arguments:
            return
        first = arguments[0]
        name = os.fsdecode(first) if isinstance(first, str | bytes | os.PathLike) else ""
        if (event == "open" and _is_device(name)) or (event == "ctypes.dlopen" and name):
            self._events.append(name)
        elif event == "subprocess.Popen" and name != sys.executable:
            # Python itself, in a process of its own, is how a probe asks a library without loading it here.
            self._events.append(f"program {name}")


def _is_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith(_HARMLESS)


def _open_devices() -> list[str]:
    """Device files among this process's descriptors."""
    found = []
    for link in Path("/proc/self/fd").glob("*"):
        try:
            target = os.readlink(link)
        except OSError:  # the one that the listing itself had open
            continue
        if _is_device(target):
            found.append(target)
    return found
