"""What became of drafts, as JSON lines: what calibration is fitted to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepinfer_core.api import ConfigError, Verified


class Recorder:
    """Appends verdicts to a file; to none when its name is empty.

    Raises:
        ConfigError: it cannot be written to.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        if self._path is not None:
            try:
                self._path.open("a", encoding="utf-8").close()
            except OSError as error:
                raise ConfigError(
                    f"plugins.spec_decode.record_file = {path!r}: cannot be written ({error.strerror}): name a file in "
                    "a folder that is there"
                ) from error

    @property
    def records(self) -> bool:
        """Whether anything is written."""
        return self._path is not None

    def add(self, results: Sequence[Verified]) -> None:
        """One line for each draft that came with confidences; its notes are how clearly its tokens won."""
        if self._path is None:
            return
        lines = [
            json.dumps(
                {
                    "request": r.request_id,
                    "rule": r.rule,
                    "confidence": list(r.confidence),
                    "accepted": r.accepted,
                }
                | ({} if r.notes is None else {"margin": list(r.notes)})
            )
            + "\n"
            for r in results
            if r.confidence is not None
        ]
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
