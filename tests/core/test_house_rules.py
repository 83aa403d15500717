"""Rules that hold the design together: who imports whom, no vendor words, no patching, small files."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_core.plugins.discovery import BUILTINS

ROOT = Path(__file__).parents[2]
CORE = ROOT / "deepinfer_core"
FILES = sorted(CORE.rglob("*.py"))
MAX_LINES = 400

# Package -> what it may import of ours, beside itself. A later name may import an earlier one, not the reverse.
MAY_IMPORT = {
    "api": (),
    "plugins": ("api",),
    "config": ("api", "plugins"),
    "checkpoint": ("api",),
    "tokenizer": ("api", "checkpoint"),  # a GGUF file holds its tokenizer
    "reference": ("api",),
    "cpu": ("api",),
    "models": ("api",),
    "conformance": ("api", "plugins"),
    "engine": ("api", "plugins", "config", "checkpoint", "tokenizer"),
    "doctor": ("api", "plugins", "config", "checkpoint", "engine"),
    "scaffold": ("api", "plugins"),
    "cli": ("api", "plugins", "config", "checkpoint", "tokenizer", "engine", "conformance", "doctor", "scaffold"),
}
ROOT_NAMES = {"__version__", "LLM", "SamplingParams"}

VENDOR_WORDS = frozenset(
    {"cuda", "nvidia", "ascend", "ascend950", "npu", "hopper", "blackwell", "triton", "xgrammar", "llguidance"}
)


def package(file: Path) -> str:
    return file.relative_to(CORE).parts[0].removesuffix(".py")


def imports(file: Path, root: Path = ROOT, *, at_run_time: bool = False) -> Iterator[str]:
    """Absolute dotted names a file below ``root`` imports; ``at_run_time`` leaves out what only type checkers see."""
    here = list(file.relative_to(root).parent.parts)

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and at_run_time and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.orelse:
                yield from walk(statement)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")))


def ours(name: str) -> str | None:
    """The package of ours that a dotted name lies in, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "deepinfer_core" and len(parts) > 1 else None


def test_every_package_of_the_core_has_a_rule() -> None:
    packages = {package(file) for file in FILES if file.parent != CORE}
    assert packages <= set(MAY_IMPORT)


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_imports_point_one_way(name: str) -> None:
    allowed = {name, *MAY_IMPORT[name]}
    wrong = [
        f"{file.relative_to(ROOT)} imports {imported}"
        for file in FILES
        if package(file) == name
        for imported in imports(file)
        if (target := ours(imported)) and target not in allowed | (ROOT_NAMES if name != "api" else set())
    ]
    assert wrong == []


def test_the_interface_needs_no_torch_at_run_time() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in FILES
        if package(file) == "api"
        for name in imports(file, at_run_time=True)
        if name.split(".")[0] in ("torch", "numpy")
    ]
    assert wrong == []


def test_the_plugin_layer_never_imports_torch() -> None:
    wrong = [f for f in FILES if package(f) == "plugins" for name in imports(f) if name.split(".")[0] == "torch"]
    assert wrong == []


def external_packages() -> list[Path]:
    """Packages of the repository's own plugins outside the core."""
    return sorted(path.parent for area in ("backends", "plugins") for path in (ROOT / area).glob("*/*/__init__.py"))


def test_plugins_outside_the_core_import_the_interface_only() -> None:
    wrong = []
    for folder in external_packages():
        for file in folder.rglob("*.py"):
            allowed = (f"{folder.name}.", "deepinfer_core.api.", "deepinfer_core.conformance.")
            names = [name for name in imports(file, folder.parent) if name.startswith("deepinfer_")]
            wrong += [f"{file}: {name}" for name in names if not f"{name}.".startswith(allowed)]
    assert wrong == []


def words_of(text: str) -> set[str]:
    letters = "".join(character if character.isalnum() or character == "_" else " " for character in text)
    return {word.lower() for identifier in letters.split() for word in identifier.split("_")}


def vendor_words(source: str) -> set[str]:
    """Vendor words among names and strings, docstrings included; comments may name one to explain."""
    strings = {tokenize.NAME, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {word for token in tokens if token.type in strings for word in words_of(token.string)} & VENDOR_WORDS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("cuda_stream = 1", {"cuda"}),
        ("x = 'runs on Hopper'", {"hopper"}),
        ('"""Docstring about triton."""', {"triton"}),
        ("x = f'{y} npu'", {"npu"}),
        ("# cuda in a comment", set()),
        ("ascending = barracuda", set()),
    ],
)
def test_the_vendor_word_test_can_fail(source: str, found: set[str]) -> None:
    assert vendor_words(source) == found


def vendor_calls(source: str) -> set[str]:
    """Devices' own parts of torch that a file reaches: streams, graphs, memory of one vendor."""
    tree = ast.parse(source)
    parts = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            parts |= {*node.module.split(".")[1:2], *(alias.name for alias in node.names)}
    return parts & {"cuda", "npu", "xpu", "mps", "musa"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.cuda.synchronize()", {"cuda"}),
        ("from torch.cuda import CUDAGraph", {"cuda"}),
        ("from torch import npu", {"npu"}),
        ("import torch.cuda.graphs", {"cuda"}),
        ("import torch\ntorch.cumsum(x, 0)", set()),
    ],
)
def test_the_vendor_call_test_can_fail(source: str, found: set[str]) -> None:
    assert vendor_calls(source) == found


def test_no_vendor_is_called_outside_of_its_backend() -> None:
    """Streams, graphs and memory are the device's. Training scripts are no part of an engine."""
    folders = [CORE, ROOT / "examples", *(f for f in external_packages() if f.parents[1].name != "backends")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 150
    assert {file.name: found for file in files if (found := vendor_calls(file.read_text(encoding="utf-8")))} == {}


def test_the_core_has_no_vendor_word() -> None:
    wrong = {str(f.relative_to(ROOT)): w for f in FILES if (w := vendor_words(f.read_text(encoding="utf-8")))}
    assert wrong == {}


def foreign_assignments(source: str) -> list[str]:
    """Assignments to attributes of imported modules or names: patches, in one word."""
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and node.args:
            targets = [ast.Attribute(value=node.args[0], attr="?")]
        for target in targets:
            base = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(target, ast.Attribute) and isinstance(base, ast.Name) and base.id in imported:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch\ntorch.mm = mine", 1),
        ("from deepinfer_core.api import Provider\nProvider.supports = mine", 1),
        ("import torch\nsetattr(torch, 'mm', mine)", 1),
        ("import torch.nn.functional as F\nF.silu = mine", 1),
        ("import torch\nclass A:\n    def f(self):\n        self.x = torch.mm", 0),
    ],
)
def test_the_patch_test_can_fail(source: str, count: int) -> None:
    assert len(foreign_assignments(source)) == count


def test_no_plugin_assigns_to_names_of_the_core_or_of_torch() -> None:
    folders = [CORE / name for name in ("reference", "cpu", "models")] + external_packages()
    files = [file for folder in folders for file in folder.rglob("*.py")]
    wrong = {str(f): found for f in files if (found := foreign_assignments(f.read_text(encoding="utf-8")))}
    assert wrong == {}


def line_count(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    assert {str(f.relative_to(ROOT)): n for f in FILES if (n := line_count(f)) > MAX_LINES} == {}


def test_the_size_of_the_core_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    counted = {name: sum(line_count(f) for f in FILES if package(f) == name) for name in ("api", "plugins", "engine")}
    text = " + ".join(f"{name} {lines}" for name, lines in counted.items())
    with capsys.disabled():
        print(f"\ncore size: {text} = {sum(counted.values())} lines (aim: 5000)")
    assert all(counted[name] for name in ("api", "plugins"))


def in_a_fresh_process(script: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
import os, sys
{first}
from deepinfer_core.plugins import choose_device, claimed, load_plugins
registry = load_plugins([])
device = choose_device(registry, None, os.environ).device
for hook in ("attention", "gemm", "moe_communication", "pointwise", "sampling", "runner_ops", "kv_layout"):
    registry.collect(f"deepinfer_{{hook}}", device=device)
for kind in ("policy", "architecture", "drafter", "sink", "command"):
    claimed(registry, kind)
print(",".join(registry.plugins), "torch" in sys.modules)
"""


def test_declaring_everything_imports_no_torch() -> None:
    loaded, torch = in_a_fresh_process(LOAD.format(first="")).split()[-2:]
    present = {name for name, module in BUILTINS.items() if _exists(module)}
    assert (set(loaded.split(",")), torch) == (present, "False")


def test_declaring_works_where_torch_is_not_installed() -> None:
    hide = "sys.modules['torch'] = None"
    assert "reference" in in_a_fresh_process(LOAD.format(first=hide))


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
