"""The child's side: ``python -m deepinfer_core.doctor.child``, a question as JSON on standard input.

Writes a line of JSON before each stage and one with the facts at the end. What plugins print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]
"""Called with a stage's name when it begins."""


def main() -> None:
    """Answer one question."""
    question = json.load(sys.stdin)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    def say(stage: str) -> None:
        write({"stage": stage})

    if question["job"] == "declare":
        from .declare import declare

        write({"facts": declare(question, say)})
    else:
        from .start import start

        write({"facts": start(question, say)})


if __name__ == "__main__":
    main()
