"""What a run found: one result a case, as JSON, and as the table that goes into a backend's README."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from cattrs.preconf.json import make_converter

Outcome = Literal["passed", "failed", "refused", "known_gap", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "refused", "known_gap", "skipped")

_converter = make_converter()
_CAPS = ("deterministic", "batch_invariant", "graph_capture", "spec_verify", "device_state")


@attrs.frozen(kw_only=True)
class Result:
    """One case's end. ``message``: why, and which provider answered. ``seconds``: how long it took."""

    case: str
    family: str
    outcome: Outcome
    message: str
    seconds: float

    @property
    def operator(self) -> str:
        return self.case.partition("/")[0].partition("[")[0]


@attrs.frozen(kw_only=True)
class Report:
    """A run of the kit.

    Attributes:
        backend, tier: what was asked.
        device: arch, evidence and torch type of the device it ran on.
        versions: of the core, its interface, the backend's distribution, torch and Python.
        results: in the order of the cases. seconds: of the whole run.
    """

    backend: str
    tier: str
    device: Mapping[str, str]
    versions: Mapping[str, str]
    results: tuple[Result, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """True when something was asked and nothing failed. Known gaps and permitted refusals do not fail."""
        return bool(self.results) and all(result.outcome != "failed" for result in self.results)

    def counts(self) -> dict[Outcome, int]:
        """How many cases ended how."""
        return {outcome: sum(r.outcome == outcome for r in self.results) for outcome in OUTCOMES}

    def to_json(self) -> str:
        """The report as JSON; :meth:`from_json` gives it back."""
        data = {"passed": self.passed, "counts": self.counts(), **_converter.unstructure(self)}
        return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """A report that :meth:`to_json` wrote."""
        return _converter.structure(json.loads(text), cls)

    def table(self) -> str:
        """Markdown: what ran where, then one row for each operator with what was asked of it."""
        lines = [
            f"Conformance of `{self.backend}`, tier *{self.tier}*: **{'passed' if self.passed else 'FAILED'}** "
            f"({', '.join(f'{count} {name}' for name, count in self.counts().items() if count)}).",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in {**self.versions, **self.device}.items()),
            f"| duration | {self.seconds:.0f} s |",
            "",
            "| operator | by | dtypes | passed | refused | known gaps | failed | proved |",
            "|---|---|---|---|---|---|---|---|",
            *(self._row(operator) for operator in dict.fromkeys(r.operator for r in self.results)),
        ]
        gaps = [r for r in self.results if r.outcome == "known_gap"]
        if gaps:
            lines += ["", "Known gaps:", "", *(f"* `{r.case}`: {_cell(r.message)}" for r in gaps)]
        return "\n".join(lines) + "\n"

    def _row(self, operator: str) -> str:
        mine = [r for r in self.results if r.operator == operator]
        passed = [r for r in mine if r.outcome == "passed"]
        by = dict.fromkeys(r.message.partition(" ")[0] for r in passed if ":" in r.message.partition(" ")[0])
        dtypes = dict.fromkeys(r.case.split("/")[1] for r in passed if r.case.count("/") > 1)
        dtypes.pop("any", None)
        proved = [cap for cap in _CAPS if any(r.case.endswith(f"/{cap}") for r in passed)]
        number = {outcome: sum(r.outcome == outcome for r in mine) for outcome in OUTCOMES}
        cells: list[Any] = [
            f"`{operator}`",
            ", ".join(by),
            ", ".join(dtypes),
            *(number[outcome] for outcome in ("passed", "refused", "known_gap", "failed")),
            ", ".join(proved),
        ]
        return f"| {' | '.join(str(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
