"""The public interface, name by name, against a file that is reviewed when it changes.

After an intended change: ``python -m tests.core.test_api_snapshot`` (from the repository's root) rewrites the file;
``docs/compatibility.md`` says which changes a minor version may make.
"""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core import api
from deepinfer_core.api import hookspecs

SNAPSHOT = Path(__file__).with_name("api_snapshot.txt")
COMMAND = "python -m tests.core.test_api_snapshot"


def describe_interface() -> str:
    """Every public name with its fields, methods or value, then every hook with its arguments."""
    lines = [line for name in sorted(api.__all__) for line in _describe(name, getattr(api, name))]
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")]
    lines += [f"hook {name}{inspect.signature(getattr(hookspecs, name))}" for name in sorted(hooks)]
    return "\n".join(lines) + "\n"


def _describe(name: str, value: Any) -> list[str]:
    if not isinstance(value, type):
        callable_ = inspect.isfunction(value)
        return [f"function {name}{inspect.signature(value)}"] if callable_ else [f"value {name} = {_stable(value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    lines = [f"class {name}({bases})"]
    if attrs.has(value):
        # Not ``field.type``: reading a record from JSON resolves those strings in place.
        kinds = {key: kind for base in reversed(value.__mro__) for key, kind in inspect.get_annotations(base).items()}
        lines += [f"    {_field(field, kinds[field.name])}" for field in attrs.fields(value)]
    else:
        lines += [f"    {key}: {kind}" for key, kind in inspect.get_annotations(value).items()]
    if issubclass(value, api.OpRequest):
        lines.append(f"    op = {value.op!r}")
    for key, member in vars(value).items():
        if key.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function):
            kind = type(member).__name__ if not inspect.isfunction(member) else "def"
            lines.append(f"    {kind} {key}{inspect.signature(function)}")
    return lines


def _field(field: Any, kind: str) -> str:
    default = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = f"{default.factory.__name__}()"
    elif default is not attrs.NOTHING:
        default = _stable(default)
    suffix = "" if default is attrs.NOTHING else f" = {default}"
    return f"{'*' if field.kw_only else ''}{field.name}: {kind}{suffix}"


def _stable(value: Any) -> str:
    """``repr``, or the name of what has an address or a version of its own."""
    if inspect.isfunction(value):
        return value.__name__
    text = repr(value).replace("typing.", "")
    return type(value).__name__ if " at 0x" in text else text


def test_the_interface_is_what_was_reviewed() -> None:
    old, new = SNAPSHOT.read_text().splitlines(), describe_interface().splitlines()
    changes = "\n".join(difflib.unified_diff(old, new, "reviewed", "now", lineterm="", n=1))
    assert not changes, f"the plugin interface changed; if that is intended, run `{COMMAND}`\n{changes}"


def test_every_public_name_and_hook_is_described() -> None:
    text = describe_interface()
    for name in api.__all__:
        assert re.search(rf"^(class|function|value) {name}\b", text, re.MULTILINE), name
    assert text.count("\nhook deepinfer_") == len([name for name in vars(hookspecs) if name.startswith("deepinfer_")])


def test_the_description_does_not_change_from_run_to_run() -> None:
    assert " at 0x" not in describe_interface()
    assert describe_interface() == describe_interface()


if __name__ == "__main__":
    SNAPSHOT.write_text(describe_interface())
