"""What became of drafts, as JSON lines: what calibration is fitted to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from deepinfer_core.api import Verified


class Recorder:
    """Appends verdicts to a file; to none when its name is empty."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

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
