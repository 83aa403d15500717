"""Known gaps: cases that a backend fails and knows about, as strict expected failures.

    [[gap]]
    case = "attention.paged[sinks]/bfloat16/decode"
    reason = "the kernel has no sinks before driver 3"
    link = "https://..."

A gap that has closed fails the run until its entry is removed, so the file never lies.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import attrs

from deepinfer_core.api import ConfigError

FILE_NAME = "conformance_gaps.toml"
_FIELDS = {"case", "reason", "link"}


@attrs.frozen(kw_only=True)
class Gap:
    """A case that may fail, and why. ``link``: where it is tracked, perhaps empty."""

    case: str
    reason: str
    link: str = ""


def read_gaps(file: str | Path) -> tuple[Gap, ...]:
    """The gaps of a file.

    Raises:
        ConfigError: the file is not there, not TOML, names a case twice, or an entry lacks a case or a reason.
    """
    path = Path(file)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"gaps file {path}: {error.strerror}") from None
    except ValueError as error:  # of TOML, or bytes that are no text
        raise ConfigError(f"gaps file {path}: {error}") from error
    if set(data) - {"gap"} or not isinstance(data.get("gap", []), list):
        raise ConfigError(f"gaps file {path}: expected [[gap]] tables only, found {', '.join(sorted(data))}")
    gaps = tuple(_gap(path, number, entry) for number, entry in enumerate(data.get("gap", []), start=1))
    names = [gap.case for gap in gaps]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"gaps file {path}: case {name!r} is listed twice; keep one entry")
    return gaps


def _gap(path: Path, number: int, entry: object) -> Gap:
    where = f"gaps file {path}: entry {number}"
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise ConfigError(f"{where}: expected case, reason and link, all text")
    unknown = sorted(set(entry) - _FIELDS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; use case, reason, link")
    for field in ("case", "reason"):
        if not entry.get(field, "").strip():
            raise ConfigError(f"{where}: {field} is missing; a gap names its case and says why")
    return Gap(case=entry["case"], reason=entry["reason"], link=entry.get("link", ""))


def check_names(gaps: Sequence[Gap], known: Sequence[str]) -> None:
    """Refuse gaps of cases that no tier has.

    Raises:
        ConfigError: naming the case and the nearest valid one.
    """
    from deepinfer_core.plugins.nearest import suggest

    for gap in gaps:
        if gap.case not in known:
            raise ConfigError(f"known gap {gap.case!r}: there is no such case{suggest(gap.case, known)}")
