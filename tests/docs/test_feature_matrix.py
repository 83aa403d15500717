"""The page of feature combinations is what plans say today, objections of plugins included."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from docs_support import ROOT

from deepinfer_core.cli.feature_matrix import FEATURES, MODELS, document

PAGE = ROOT / "docs" / "feature-matrix.md"
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

OBJECTING = """
from deepinfer_core.api import Objection, PluginInfo, hookimpl


@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="objecting")


@hookimpl
def deepinfer_check_plan(plan):
    if "int8_weight_only" in {choice.provider.partition(":")[2] for choice in plan.choices}:
        return [Objection("error", "eight bits are not enough for anybody")]
    if plan.facts["loop"] == "one step ahead":
        return [Objection("warning", "running ahead of oneself")]
    return []
"""


def cells(page: str, model: str) -> dict[tuple[str, str], str]:
    """(row, column) -> what stands there."""
    section = page.split(f"\n## {model}\n", 1)[1].split("\n## ", 1)[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return {(row[0].strip("*"), name): cell for row in rows for name, cell in zip(head[1:], row[1:], strict=True)}


def notes(page: str) -> dict[str, str]:
    return dict(re.findall(r"^(\d+)\. (.+)$", page.split("## Notes", 1)[1], re.MULTILINE))


@pytest.fixture
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating extends the path; a test gives it back."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_path")
def test_the_page_is_what_plans_say() -> None:
    assert document(DISTRIBUTIONS) == PAGE.read_text(encoding="utf-8"), "run: make docs"


@pytest.mark.parametrize("model", MODELS)
def test_every_pair_stands_once_and_every_number_has_its_note(model: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    found, known = cells(page, model), notes(page)
    names = list(FEATURES)
    for row, first in enumerate(names):
        for column, second in enumerate(names):
            cell = found[first, second]
            assert bool(cell) == (column <= row), (first, second)
            assert re.fullmatch(r"(yes|no \[\d+\]|\[\d+\]( \[\d+\])*)?", cell)
            assert set(re.findall(r"\d+", cell)) <= set(known)
    assert found["one step ahead", "one step ahead"] == "yes"


@pytest.mark.usefixtures("_path")
def test_what_a_plugin_objects_to_stands_there(tmp_path: Path) -> None:
    (tmp_path / "objecting_plugin.py").write_text(OBJECTING, encoding="utf-8")
    entry = '[project.entry-points."deepinfer.plugins.v1"]\nobjecting = "objecting_plugin"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "objecting"\n{entry}', encoding="utf-8")
    page = document([*DISTRIBUTIONS, tmp_path])
    found, known = cells(page, "Qwen3"), notes(page)

    def said(first: str, second: str) -> str:
        return re.sub(r"\[(\d+)\]", lambda number: known[number[1]], found[first, second])

    assert said("one step ahead", "one step ahead") == "running ahead of oneself"
    assert said("8-bit weights", "8-bit weights") == "no eight bits are not enough for anybody"
    assert said("8-bit weights", "one step ahead") == "no eight bits are not enough for anybody"
    assert found["whole prompts", "whole prompts"] == "yes"
