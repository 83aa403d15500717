"""The program as a whole: what it imports, how it fails, and commands of plugins."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from deepinfer_core.api import LazyRef, PluginError
from deepinfer_core.cli import main
from deepinfer_core.cli.guard import one_line  # fmt: skip
from deepinfer_core.cli.guard import run as guarded
from deepinfer_core.cli.program import BUILT_IN

PROBE = """
import sys, time
start = time.perf_counter()
from deepinfer_core.cli import main
code = main({arguments!r})
print(f"{{time.perf_counter() - start:.3f}} s", file=sys.stderr)
heavy = [name for name in ("torch", "numpy", "transformers", "tokenizers") if name in sys.modules]
print(code, heavy, file=sys.stderr)
"""


def in_subprocess(code: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plugins"], ["plugins", "--json"], ["plugins", "--load"], ["generate", "--help"],
     ["explain", "--help"], ["inspect", "--help"]],
)  # fmt: skip
def test_imports_nothing_heavy(arguments: list[str]) -> None:
    ended = in_subprocess(PROBE.format(arguments=arguments))
    print(ended.stderr)
    assert ended.stderr.splitlines()[-1] == "0 []"
    assert ended.stdout


def test_help_lists_every_command_with_its_line(run: Callable[..., Any]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        result = run(*arguments)
        assert result.code == 0
        for name, (line, _) in BUILT_IN.items():
            assert f"{name}  " in result.out
            assert line in result.out


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_table_says_what_the_command_says(name: str) -> None:
    line, target = BUILT_IN[name]
    command = LazyRef(target).load()
    assert isinstance(command, click.Command)
    assert command.name == name
    assert (command.help or "").startswith(line.rstrip(".").split(",")[0])


def test_unknown_command_suggests_one_of_a_plugin(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measuring.py").write_text(
        "from deepinfer_core.api import CommandInfo, LazyRef, PluginInfo, hookimpl\n\n"
        "@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name='measuring', help='Measures')\n\n"
        "@hookimpl\ndef deepinfer_commands():\n"
        "    return [CommandInfo(name='count-steps', help='Counts.', command=LazyRef('measuring:nothing'))]\n"
    )
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", str(tmp_path / "measuring.py"))
    assert refused("count-step").startswith("there is no command 'count-step'; did you mean 'count-steps'?")


def test_unknown_command_suggests(refused: Callable[..., str]) -> None:
    assert refused("genrate") == "there is no command 'genrate'; did you mean 'generate'? (see 'deepinfer --help')"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--foo"], "No such option '--foo'"),
        (["--foo"], "No such option '--foo'"),
        (["generate", "--max-tokens", "many"], "'many' is not a valid integer"),
        (["inspect"], "Missing argument 'CHECKPOINT'"),
        (["generate", "--set", "kv_cache.blok_size=1"], "did you mean 'kv_cache.block_size'?"),
        (["generate", "--dtype", "fp16"], "model.dtype = 'fp16' (from --dtype): expected 'auto' or"),
        (["plugins", "--log-level", "loud"], "logging.level = 'loud' (from --log-level)"),
        (["plugins", "--config", "/no/such.toml"], "configuration file '/no/such.toml' cannot be read"),
        (["inspect", "/no/such/model"], "/no/such/model"),
        (["explain", "--set", "plugins.allow=acme"], "plugins.allow (DEEPINFER_PLUGINS): no plugin named 'acme'"),
        (["explain", "--no-plugin", "acme"], "plugins.block (--no-plugin): no plugin named 'acme'"),
        (["conformance", "reference", "--gaps", "/no/such.toml"], "gaps file /no/such.toml: No such file"),
        (["inspect", "demo", "--model", "demo"], "leave out --model"),
        (["conformance", "--policy", "no_such:Policy"], "ModuleNotFoundError"),
        (["conformance", "--policy", "pathlib:Path"], "TypeError"),
        (["conformance", "--policy", "fractions:Fraction"], "a class is made with None for its settings"),
        (["conformance", "--policy", "sys:exit"], "'sys:exit': SystemExit"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, refused: Callable[..., str]) -> None:
    assert said.lower() in refused(*arguments).lower()


def test_unknown_variable_is_one_line(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_FOO", "1")
    text = refused("generate", "--model", "demo", "--prompt", "x")
    assert text == "unknown environment variable DEEPINFER_FOO; unset it: settings are written DEEPINFER_GROUP__FIELD"


def test_usage_errors_name_the_command_to_ask(refused: Callable[..., str]) -> None:
    assert refused("generate", "--foo").endswith("(see 'deepinfer generate --help')")


def test_lines_of_an_error_are_joined() -> None:
    assert one_line("no provider:\n  a: too old\n\n  b: too new\n") == "no provider: a: too old; b: too new"


def test_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert guarded(interrupted, []) == 130
    assert capsys.readouterr().err.strip() == ""


def test_interrupt_while_the_program_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "deepinfer_core.cli.program":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "deepinfer_core.cli.program")
    monkeypatch.setattr(sys, "meta_path", [Impatient, *sys.meta_path])
    assert main(["--version"]) == 130


def test_a_bug_keeps_its_traceback() -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guarded(broken, [])


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = textwrap.dedent(
        """
        import click, os, sys
        from deepinfer_core.cli.guard import run
        @click.command()
        def long():
            for _ in range(100000):
                click.echo("x" * 100)
        sys.exit(run(long, []))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (1, b"")


PLUGIN = """
import click
from deepinfer_core.api import CommandInfo, LazyRef, PluginInfo, hookimpl

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="{name}", help="greets")

@hookimpl
def deepinfer_commands():
    return [CommandInfo(name="greet", help="Say hello.", command=LazyRef("{target}"))]

@click.command()
@click.argument("who")
def greet(who):
    click.echo(f"hello {{who}} from {name}")
"""


def write_plugin(folder: Path, name: str, target: str = "{name}:greet") -> str:
    file = folder / f"{name}.py"
    file.write_text(PLUGIN.format(name=name, target=target.format(name=name)))
    return str(file)


@pytest.fixture
def _forget_modules() -> Any:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("greeter_"):
            del sys.modules[name]


@pytest.mark.usefixtures("_forget_modules")
def test_command_of_a_plugin_runs(tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", write_plugin(tmp_path, "greeter_one"))
    assert run("greet", "you").out == "hello you from greeter_one\n"


@pytest.mark.usefixtures("_forget_modules")
def test_command_of_two_plugins_names_both(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_plugin(tmp_path, name) for name in ("greeter_one", "greeter_two")]
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", ",".join(files))
    text = refused("greet", "you")
    assert "greeter_one" in text
    assert "greeter_two" in text


@pytest.mark.usefixtures("_forget_modules")
@pytest.mark.parametrize(
    ("target", "said"),
    [("no_such_module:greet", "cannot be imported"), ("{name}:deepinfer_plugin", "no click.Command")],
)
def test_command_that_cannot_be_used(
    target: str, said: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", write_plugin(tmp_path, "greeter_one", target))
    assert said in refused("greet", "you")


def test_plugins_are_not_loaded_for_a_built_in_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PluginError("loaded")

    monkeypatch.setattr("deepinfer_core.plugins.load_plugins", refuse)
    assert main(["plugins"]) == 0
    assert main(["generate", "--help"]) == 0
