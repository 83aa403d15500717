"""What to do about a file that is not what its name says."""

from __future__ import annotations

from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"
"""How the pointer begins that Git LFS leaves in a clone in place of a file (its specification, "The pointer file")."""


def remedy(file: Path) -> str:
    """The end of an error about ``file``, which could not be read as what it should be."""
    try:
        with file.open("rb") as opened:
            pointer = opened.read(len(POINTER)) == POINTER
    except OSError:
        pointer = False
    if pointer:
        return "it is Git LFS's pointer to the file: run 'git lfs pull' in the folder that was cloned"
    return "it is damaged or was cut, fetch it again"
