"""A new plugin of one kind, which does something real from the start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from deepinfer_core.api import ConfigError
from deepinfer_core.plugins import Kind as ClaimKind
from deepinfer_core.plugins import claimed, load_plugins

from .names import check_directory, check_name
from .render import render_folder, write


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of plugin.

    Attributes:
        summary: what the generated one does. imports: packages it needs besides the core.
        example: how it is used, with ``{name}`` for its name. next: what to change first.
    """

    summary: str
    imports: tuple[str, ...]
    example: str
    next: str


_GENERATE = '$ deepinfer generate --model demo --temperature 0 --max-tokens 32 --prompt "Count: 1 2 3 1 2"'

KINDS: Mapping[str, Kind] = {
    "scheduler": Kind(
        summary="Highest priority first, and nobody waits for ever",
        imports=("attrs>=23.2", "numpy>=1.26"),
        example=f"{_GENERATE} --set scheduling.policy={{name}}",
        next="Change `policy.py`: it is asked about order, shares and victims, and can break nothing.",
    ),
    "speculation": Kind(
        summary="Drafts what followed the last tokens before",
        imports=("attrs>=23.2", "numpy>=1.26"),
        example=f"{_GENERATE} --set speculation.method={{name}} --set speculation.max_draft_tokens=3",
        next="Change `drafter.py`: the engine verifies every guess, so no text changes.",
    ),
    "constraint": Kind(
        summary="Texts that are one of several",
        imports=("attrs>=23.2", "numpy>=1.26"),
        example=f"{_GENERATE} --set structured_outputs.backend={{name}}",
        next="Change `compiler.py` and `choices.py`: `check` refuses what `fill` cannot enforce.",
    ),
    "metrics": Kind(
        summary="A line of JSON for each step",
        imports=("attrs>=23.2",),
        example=f"{_GENERATE} --set logging.metrics={{name}}",
        next="Change `sink.py`: it runs in a thread of its own.",
    ),
    "model": Kind(
        summary="A small decoder, written against operator contracts alone",
        imports=("attrs>=23.2", "torch>=2.11"),
        example="$ deepinfer inspect DIRECTORY",
        next="Change `config.py` and `model.py`: the tensors' names, then the layers.",
    ),
}
"""Kind -> what is written for it."""


_CLAIMS: Mapping[str, ClaimKind] = {
    "scheduler": "policy", "speculation": "drafter", "constraint": "constraint", "metrics": "sink",
}  # fmt: skip
"""Kind -> what the generated plugin has under its own name."""


def _check_claim(name: str, kind: str) -> None:
    """ConfigError if a plugin has a policy, drafter, ... of that name: users would have to say which, always."""
    owners = claimed(load_plugins(), _CLAIMS[kind]).get(name, ()) if kind in _CLAIMS else ()
    if owners:
        raise ConfigError(f"name {name!r}: taken by a {_CLAIMS[kind]} of plugin {owners[0][0]!r}; choose another")


def new_plugin(name: str, kind: str, *, directory: str | Path | None = None) -> list[Path]:
    """Write the project of a plugin.

    Args:
        name: of plugin and package; see :func:`deepinfer_core.scaffold.names.check_name`.
        kind: of :data:`KINDS`.
        directory: a new one; None: the distribution's name, here.

    Returns:
        The files, in the order they were written.

    Raises:
        ConfigError: a kind, name or directory that cannot be used.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind!r}: expected one of {', '.join(KINDS)}")
    project = check_name(name)
    _check_claim(name, kind)
    target = check_directory(project, directory)
    about = KINDS[kind]
    needed = ("deepinfer-core>=0.1,<1", *about.imports)
    values = {
        **project.values(),
        "kind": kind,
        "summary": about.summary,
        "dependencies": ", ".join(f'"{need}"' for need in needed),
        "example": about.example.format(name=name),
        "next": about.next,
    }
    return write(target, {**render_folder("plugin/common", values), **render_folder(f"plugin/{kind}", values)})
