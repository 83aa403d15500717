"""The kit as a pytest plugin: ``pytest --pyargs deepinfer_core.conformance --backend acme --tier boots``.

Loaded by pytest wherever the core is installed, so it imports nothing until a backend is named.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .case import Tier
    from .report import Result
    from .target import Target

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--backend", {"metavar": "NAME", "help": "backend to ask, as after --accelerator"}),
    ("--tier", {"choices": ("boots", "serves", "full"), "default": "boots", "help": "how much is asked"}),
    ("--family", {"action": "append", "default": [], "help": "only this family or operator; may be repeated"}),
    ("--gaps", {"metavar": "FILE", "help": "known gaps, as strict expected failures"}),
    ("--report", {"metavar": "FILE", "help": "write all results as JSON"}),
    ("--plugin-file", {"action": "append", "default": [], "help": "a backend that is not installed; may be repeated"}),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options. One that another plugin has already is left to it."""
    group = parser.getgroup("deepinfer conformance")
    for name, settings in _OPTIONS:
        try:
            group.addoption(name, **{"dest": f"deepinfer_{name[2:].replace('-', '_')}", "default": None} | settings)
        except ValueError:
            continue


def option(config: pytest.Config, name: str) -> Any:
    """The value of an option of ours; None where another plugin took its name."""
    return config.getoption(f"deepinfer_{name}", None)


class Session:
    """One run: the target, opened once, and the results so far."""

    def __init__(self, config: pytest.Config) -> None:
        from .gaps import check_names, read_gaps
        from .kit import all_cases, open_for, select

        self.tier: Tier = option(config, "tier") or "boots"
        families = option(config, "family") or ()
        self.target: Target = open_for(option(config, "backend"), families, option(config, "plugin_file") or ())
        self.gaps = read_gaps(option(config, "gaps")) if option(config, "gaps") else ()
        check_names(self.gaps, [case.id for case in all_cases(self.target.dtype)])
        self.cases = {c.id: c for c in select(self.tier, families, self.target.dtype)}
        self.results: list[Result] = []
        self.start = time.perf_counter()

    def ask(self, name: str) -> Result:
        from .kit import ask

        self.results.append(ask(self.cases[name], self.target, self.gaps))
        return self.results[-1]

    def finish(self, report: str | None) -> str:
        """Close the target, write the report, and give the table."""
        from .kit import make_report

        self.target.close()
        found = make_report(self.target, self.tier, self.results, time.perf_counter() - self.start)
        if report:
            Path(report).write_text(found.to_json(), encoding="utf-8")
        return found.table()


_KEY: pytest.StashKey[Session] = pytest.StashKey()


def session_of(config: pytest.Config) -> Session | None:
    """The run of this pytest process; None when no backend was named."""
    if not option(config, "backend"):
        return None
    if _KEY not in config.stash:
        from deepinfer_core.api import DeepInferError

        try:
            config.stash[_KEY] = Session(config)
        except DeepInferError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_KEY]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case, named after it."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    session = session_of(metafunc.config)
    if session is None:
        raise pytest.UsageError("deepinfer_core.conformance: name a backend with --backend")
    names = list(session.cases)
    metafunc.parametrize("conformance_case", names, ids=names)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The capability table below the tests."""
    if _KEY in config.stash and config.stash[_KEY].results:
        terminalreporter.section("conformance")
        terminalreporter.write_line(config.stash[_KEY].finish(option(config, "report")))
