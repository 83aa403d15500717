"""A plugin's source files, read and not run: what they import, and what they assign to."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import attrs


@attrs.frozen
class Source:
    """A module of a plugin's package."""

    file: Path
    package: str
    tree: ast.Module


def plugin_sources(entry_point: str) -> list[Source]:
    """The modules of the package an entry point lies in: all of its folder, or the one file of a plain module.

    Args:
        entry_point: ``"package.module:attribute"``, or the path of a ``.py`` file.
    """
    if entry_point.endswith(".py"):
        return [_source(Path(entry_point), "")]
    module = entry_point.partition(":")[0].strip()
    # The core's own plugins share one distribution: each is its own sub-package.
    package = ".".join(module.split(".")[:2]) if module.startswith("deepinfer_core.") else module.split(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        return [_source(origin, "")]
    files = [file for file in sorted(origin.parent.rglob("*.py")) if "tests" not in file.parts]
    return [_source(file, package) for file in files]


def _source(file: Path, package: str) -> Source:
    return Source(file, package, ast.parse(file.read_text(encoding="utf-8"), str(file)))


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module imports; relative imports stay inside and are left out."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def hooks(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of every hook that a module implements and that an older core must have."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("deepinfer_"):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if any("hookimpl" in mark for mark in marks) and not any("optionalhook=True" in mark for mark in marks):
                yield node.lineno, node.name


def foreign_assignments(source: Source) -> Iterator[tuple[int, str]]:
    """(line, code) of every assignment to, or deletion of, an attribute of something that was imported.

    Attributes of the plugin's own modules are its own affair.
    """
    foreign = _imported(source)
    for node in ast.walk(source.tree):
        for target in _targets(node):
            base = _base(target)
            if isinstance(base, ast.Name) and base.id in foreign and _is_patch(target):
                yield getattr(node, "lineno", 0), ast.unparse(node).splitlines()[0]


def _base(node: ast.expr) -> ast.expr:
    """What an attribute, an entry, or ``vars(...)`` of it, belongs to in the end."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.args[0] if node.args and ast.unparse(node.func) == "vars" else node.func
        else:
            return node


def _imported(source: Source) -> set[str]:
    """Names that stand for something of another package, simple aliases (``t = torch``) included."""
    names = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names if not _own(source, a.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and not _own(source, node.module or ""):
            names |= {a.asname or a.name for a in node.names}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _own(source: Source, module: str) -> bool:
    return bool(source.package) and f"{module}.".startswith(f"{source.package}.")


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in _flat(target)]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Delete):
        return node.targets
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "delattr"):
        return [ast.Attribute(value=node.args[0], attr="?")]
    return []


def _flat(target: ast.expr) -> list[ast.expr]:
    return (
        [part for item in target.elts for part in _flat(item)] if isinstance(target, ast.Tuple | ast.List) else [target]
    )


def _is_patch(target: ast.expr) -> bool:
    """An attribute, or an entry of a namespace (``vars(torch)["mm"]``, ``torch.__dict__["mm"]``)."""
    if isinstance(target, ast.Attribute):
        return True
    return isinstance(target, ast.Subscript) and any(
        (isinstance(part, ast.Attribute) and part.attr == "__dict__")
        or (isinstance(part, ast.Call) and ast.unparse(part.func) == "vars")
        for part in ast.walk(target.value)
    )
