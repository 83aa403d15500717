"""The kit as a pytest plugin: ``pytest --pyargs deepinfer_core.conformance --backend acme --tier boots``.

Loaded by pytest wherever the core is installed, so it imports nothing until a backend is named.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .case import Case, Tier
    from .gaps import Gap
    from .report import Result
    from .target import Target

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--backend", {"metavar": "NAME", "help": "backend to ask, as after --accelerator"}),
    ("--tier", {"choices": ("boots", "serves", "full"), "default": "boots", "help": "how much is asked"}),
    ("--family", {"action": "append", "default": [], "help": "only this family or operator; may be repeated"}),
    ("--policy", {"metavar": "MODULE:CLASS", "help": "a scheduling policy to check"}),
    ("--gaps", {"metavar": "FILE", "help": "known gaps, as strict expected failures"}),
    ("--report", {"metavar": "FILE", "help": "write all results as JSON"}),
    ("--plugin-file", {"action": "append", "default": [], "help": "a backend that is not installed; may be repeated"}),
)


_PACKAGE = "deepinfer_core.conformance"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the kit's options, in a run that names the kit and in no other: their names are short."""
    config: Any = pluginmanager.get_plugin("pytestconfig")
    if config is None or not any(_PACKAGE in str(word).replace("/", ".") for word in config.invocation_params.args):
        return
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
        from .policies import policy_results

        self.tier: Tier = option(config, "tier") or "boots"
        self.policy: str | None = option(config, "policy")
        self.target: Target | None = None
        self.cases: dict[str, Case] = {}
        self.gaps: tuple[Gap, ...] = ()
        self.results: list[Result] = []
        self.start = time.perf_counter()
        self.about_policy = {r.case: r for r in policy_results(self.policy)} if self.policy else {}
        if option(config, "backend"):
            self._open(config)

    def _open(self, config: pytest.Config) -> None:
        from .gaps import check_names, read_gaps
        from .kit import all_cases, open_for, select

        families = option(config, "family") or ()
        self.target = open_for(option(config, "backend"), families, option(config, "plugin_file") or ())
        self.gaps = read_gaps(option(config, "gaps")) if option(config, "gaps") else ()
        check_names(self.gaps, [case.id for case in all_cases(self.target.dtype)])
        self.cases = {c.id: c for c in select(self.tier, families, self.target.dtype)}

    @property
    def names(self) -> list[str]:
        return [*self.cases, *self.about_policy]

    def ask(self, name: str) -> Result:
        from .kit import ask

        if name in self.about_policy:
            self.results.append(self.about_policy[name])
        else:
            assert self.target is not None
            self.results.append(ask(self.cases[name], self.target, self.gaps))
        return self.results[-1]

    def finish(self, report: str | None) -> str:
        """Close the target, write the report, and give the table."""
        from .kit import make_report, policy_report

        if self.target is None:
            found = policy_report(str(self.policy), self.tier, self.results)
        else:
            self.target.close()
            found = make_report(self.target, self.tier, self.results, time.perf_counter() - self.start)
        if report:
            Path(report).write_text(found.to_json(), encoding="utf-8")
        return found.table()


_KEY: pytest.StashKey[Session] = pytest.StashKey()


def session_of(config: pytest.Config) -> Session | None:
    """The run of this pytest process; None when neither a backend nor a policy was named."""
    if not (option(config, "backend") or option(config, "policy")):
        return None
    if _KEY not in config.stash:
        from deepinfer_core.api import DeepInferError

        try:
            config.stash[_KEY] = Session(config)
        except DeepInferError as error:
            pytest.exit(f"deepinfer_core.conformance: {error}", returncode=2)
    return config.stash[_KEY]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case, named after it."""
    if "conformance_case" not in metafunc.fixturenames:
        return
    session = session_of(metafunc.config)
    if session is None:
        raise pytest.UsageError("deepinfer_core.conformance: name a backend with --backend")
    metafunc.parametrize("conformance_case", session.names, ids=session.names)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The capability table below the tests."""
    if _KEY in config.stash and config.stash[_KEY].results:
        terminalreporter.section("conformance")
        terminalreporter.write_line(config.stash[_KEY].finish(option(config, "report")))
