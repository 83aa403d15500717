"""Templates to files. A template's path is its file's, with ``PACKAGE`` for the package and ``.j2`` at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from deepinfer_core.api import ConfigError

TEMPLATES = Path(__file__).parent / "templates"

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    undefined=jinja2.StrictUndefined,
    autoescape=False,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, values: Mapping[str, Any]) -> str:
    """One template's text."""
    return _environment.get_template(template).render(values)


def render_folder(folder: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Every template below ``folder``: path in the project -> text."""
    root = TEMPLATES / folder
    return {
        str(file.relative_to(root)).removesuffix(".j2").replace("PACKAGE", values["package"]): render(
            str(file.relative_to(TEMPLATES)), values
        )
        for file in sorted(root.rglob("*.j2"))
    }


def write(target: Path, files: Mapping[str, str]) -> list[Path]:
    """Make ``target`` and write ``files`` into it. All texts are there before the first file is.

    Raises:
        ConfigError: the operating system refuses.
    """
    written = []
    try:
        target.mkdir()
        for name, text in files.items():
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            written.append(file)
    except OSError as error:
        raise ConfigError(f"directory {target}: {error.strerror or error}") from error
    return written
