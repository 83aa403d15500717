"""Reads the project's pages: code blocks, links, headings, code spans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs
from docs_support import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}

_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """One fenced block."""

    page: str
    language: str
    text: str


def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def blocks(language: str, pages: Iterator[str] | None = None) -> list[Block]:
    return [
        Block(page, found[1], found[2])
        for page in (pages or PAGES)
        for found in _BLOCK.finditer(text_of(page))
        if found[1] == language
    ]


def commands() -> list[tuple[str, str]]:
    """``(page, command)`` of every line that begins with a prompt in a console block."""
    return [
        (block.page, line.removeprefix("$ "))
        for block in blocks("console")
        for line in block.text.splitlines()
        if line.startswith("$ ")
    ]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", text_of(page))


def spans(page: str) -> list[str]:
    """Inline code of the prose."""
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page))


def anchors(path: Path) -> set[str]:
    """Names that a link may have after ``#``, as forges make them from headings."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_rows(page: str) -> list[list[str]]:
    """Cells of every table row that is neither a head nor a rule."""
    rows = []
    lines = prose(page).splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_rule = re.fullmatch(r"\|(?:-+\|)+", line) is not None
        if line.startswith("|") and before.startswith("|") and not is_rule:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
