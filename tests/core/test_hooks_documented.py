"""Every hook is documented with its exact arguments, and tested."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from deepinfer_core import api
from deepinfer_core.api import hookspecs
from deepinfer_core.plugins.document import document
from deepinfer_core.plugins.inspection import (
    check_implementations,
    hook_arguments,
    hook_record,
    new_manager,
    record_name,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
HOOKS = hook_arguments(new_manager())
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_is_what_the_specifications_say() -> None:
    assert document() == PAGE, "run: python -m deepinfer_core.plugins.document > docs/hooks.md"


def sections() -> dict[str, str]:
    """Heading of a hook, as ``name(arguments)`` -> the text below it."""
    parts = re.split(r"^### `([^`]+)`$", re.sub(r"^## .*$", "", PAGE, flags=re.MULTILINE), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_exactly_the_hooks_there_are_with_their_arguments() -> None:
    headings = re.findall(r"^### `([^`]+)`$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(f"{name}({', '.join(arguments)})" for name, arguments in HOOKS.items())


@pytest.mark.parametrize("heading", sorted(sections()))
def test_a_section_says_which_record_a_hook_returns(heading: str) -> None:
    record = hook_record(heading.partition("(")[0])
    said = sections()[heading]
    if record is api.Provider:
        assert "Providers of `" in said
    elif record is not None:
        assert all(f"`{name}`" in said for name in record_name(record).split(" or "))


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_has_a_docstring(hook: str) -> None:
    assert getattr(hookspecs, hook).__doc__


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_every_hook_is_named_in_a_test(hook: str) -> None:
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    assert any(hook in file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("source", EXAMPLES)
def test_the_pages_examples_are_valid_implementations(source: str) -> None:
    namespace = {name: getattr(api, name) for name in api.__all__} | {"Path": Path, "AcmeSettings": None}
    exec(compile(source, "hooks.md", "exec"), namespace)
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    hooks = {name: staticmethod(namespace[name]) for name in functions if name in HOOKS}
    if hooks:
        check_implementations(new_manager(), type("Plugin", (), hooks)())


def test_the_page_says_which_interface_it_describes() -> None:
    assert f"interface {'.'.join(map(str, hookspecs.API_VERSION))}" in PAGE
