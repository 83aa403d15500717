"""Prints which features work together: ``python -m deepinfer_core.cli.feature_matrix plugins/*``.

Every cell is a plan that was really made, on the host, for a small model with both features switched on. A plan ends by
asking every plugin's ``deepinfer_check_plan``, so what a plugin objects to stands here by itself.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_core.api import ENTRY_POINT_GROUP, DeepInferError
from deepinfer_core.checkpoint import Checkpoint, open_checkpoint
from deepinfer_core.config import load_config
from deepinfer_core.conformance.tiny_models import DEEPSEEK_V4, QWEN3, QWEN3_WINDOW, describe, write_checkpoint
from deepinfer_core.engine.loop_mode import AHEAD
from deepinfer_core.engine.planning import make_plan
from deepinfer_core.plugins import load_plugins

MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3": QWEN3,
    "Qwen3 with sliding windows": QWEN3_WINDOW,
    "DeepSeek-V4": DEEPSEEK_V4,
}

AHEAD_SETTING = "scheduling.async_scheduling"
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "one step ahead": {AHEAD_SETTING: True},
    "decode graphs": {"scheduling.decode_graphs": True},
    "whole prompts": {"scheduling.chunked_prefill": False},
    "n-gram drafts": {"speculation.method": "ngram"},
    "rejection": {"speculation.method": "ngram", "speculation.verify": "rejection"},
    "confidence": {"speculation.method": "ngram", "speculation.schedule": "confidence"},
    "batch invariance": {"features.batch_invariant": True},
    "8-bit weights": {"ops": {"gemm.linear": ["cpu:int8_weight_only"]}},
}
"""What users switch on, and the settings that do it."""

_HEAD = """# Feature combinations

This page is generated: `python -m deepinfer_core.cli.feature_matrix plugins/* > docs/feature-matrix.md`.

Each cell is a plan that was made on the host for a small model with both features switched on, every other setting at
its default and the plugins of this repository loaded. `yes`: the plan is as asked. A number: it works, with the note of
that number. `no`: it is refused before weights load, with the note's text. A plan ends by asking every plugin's
[`deepinfer_check_plan`](hooks.md#deepinfer_check_planplan), so what a plugin objects to is found here.

| feature | settings |
|---|---|"""


class Notes:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def lines(self) -> Iterator[str]:
        for text, number in self._numbers.items():
            yield f"{number}. {text}"


def document(distributions: Sequence[Path]) -> str:
    """The page, in Markdown. ``distributions``: source folders of plugins that are loaded besides the core's own."""
    modules = [module for folder in distributions for module in _modules(folder)]
    notes = Notes()
    lines = [_HEAD]
    lines += [f"| {name} | {_written(settings)} |" for name, settings in FEATURES.items()]
    with tempfile.TemporaryDirectory() as folder:
        for title, config in MODELS.items():
            path = Path(folder) / title.replace(" ", "_")
            write_checkpoint(path, config, describe(config, load_plugins([]), "float32"), "float32")
            with open_checkpoint(path) as checkpoint:
                lines += ["", f"## {title}", "", *_table(checkpoint, modules, notes)]
    return "\n".join([*lines, "", "## Notes", "", *notes.lines()]) + "\n"


def _modules(folder: Path) -> list[str]:
    """Modules that a distribution's entry points name, importable from now on."""
    about = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    entries = about["project"].get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    if entries and str(folder) not in sys.path:
        sys.path.append(str(folder))
    return list(entries.values())


def _written(settings: Mapping[str, Any]) -> str:
    """Settings as after ``--set``."""
    flat = {
        f"{name}.{key}" if isinstance(value, Mapping) else name: part
        for name, value in settings.items()
        for key, part in (value.items() if isinstance(value, Mapping) else [("", value)])
    }
    texts = [f"`{name}={','.join(v) if isinstance(v, list) else str(v).lower()}`" for name, v in flat.items()]
    return ", ".join(texts)


def _table(checkpoint: Checkpoint, modules: Sequence[str], notes: Notes) -> Iterator[str]:
    """The lower half: a pair stands once, a feature alone on the diagonal."""
    names = list(FEATURES)
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for row, name in enumerate(names):
        cells = [_cell(checkpoint, modules, notes, name, other) for other in names[: row + 1]]
        yield f"| **{name}** | {' | '.join([*cells, *[''] * (len(names) - len(cells))])} |"


def _cell(checkpoint: Checkpoint, modules: Sequence[str], notes: Notes, first: str, second: str) -> str:
    settings = {**FEATURES[second], **FEATURES[first], "accelerator": "cpu"}
    for name, value in {**FEATURES[second], **FEATURES[first]}.items():
        if FEATURES[first].get(name, value) != FEATURES[second].get(name, value):
            return ""  # two values of one setting
    settings |= {"plugins": {"allow": [], "paths": list(modules)}}
    try:
        planned = make_plan(load_config(environ={}, overrides=settings), checkpoint, environ={})
    except DeepInferError as error:
        return f"no [{notes.number(_line(error))}]"
    said = list(planned.objections)
    loop = planned.plan.facts["loop"]
    if settings.get(AHEAD_SETTING) is True and loop != AHEAD:
        said.append(f"The loop is {loop}.")
    return " ".join(f"[{notes.number(text)}]" for text in said) or "yes"


def _line(error: DeepInferError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    print(document([Path(argument) for argument in sys.argv[1:]]), end="")
