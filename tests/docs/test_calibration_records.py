"""The speculation benchmark's calibration: one engine, and each mode's and kind's drafts apart."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("speculation")
    for name, found in list(sys.modules.items()):
        if str(FOLDER) in str(getattr(found, "__file__", "")):
            del sys.modules[name]


class Recording:
    """As an engine that verifies by rejection: of a request without a seed; says in ``confidence`` what was asked."""

    opened = 0

    def __init__(self, file: str) -> None:
        self.file, self.asked = Path(file), 0

    def __enter__(self) -> Recording:
        Recording.opened += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, texts: list[str], params: list[Any]) -> None:
        self.asked += 1
        with self.file.open("a", encoding="utf-8") as file:
            for text, wanted in zip(texts, params, strict=True):
                rule = "exact" if wanted.temperature == 0 or wanted.seed is not None else "rejection"
                line = {"request": text, "rule": rule, "confidence": [0.1 * self.asked], "accepted": len(texts) % 2}
                file.write(json.dumps(line) + "\n")


def test_one_engine_has_all_modes_and_kinds(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(drafter: str, depth: int, *, record: str, **more: Any) -> Recording:
        assert more == {"verify": "rejection", "calibration": "off", "accelerator": "cpu"}
        return Recording(record)

    monkeypatch.setattr(measured, "open_llm", opened)
    texts = {"code": ["a", "b"], "prose": ["c"], "json": ["d", "e", "f"]}
    found = measured.records_of(texts, Namespace(tokens=4, accelerator="cpu"))
    assert Recording.opened == 1
    assert list(found) == list(measured.MODES)
    asked = 0
    for kinds in found.values():
        assert list(kinds) == list(texts)
        for kind, records in kinds.items():
            asked += 1
            assert records.prompts.tolist() == list(range(len(texts[kind])))
            assert 1 / (1 + np.exp(-records.logits[:, 0])) == pytest.approx([0.1 * asked] * len(texts[kind]))
