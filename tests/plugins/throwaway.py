"""Throw-away distributions, written as an installer would write them, on a path of their own."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from deepinfer_core.plugins import Registry, load_plugins
from deepinfer_core.plugins.discovery import BUILTINS

PRELUDE = "from deepinfer_core.api import *\n"


def good(name: str, body: str = "", **info: object) -> str:
    """Source of a plugin that works, with more hooks in ``body``."""
    fields = "".join(f", {key}={value!r}" for key, value in info.items())
    return (
        f"{PRELUDE}@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name={name!r}{fields})\n"
        + textwrap.dedent(body)
    )


@attrs.define
class Site:
    """A folder on ``sys.path`` that distributions are installed into."""

    root: Path

    def module(self, name: str, source: str) -> None:
        file = self.root / (name.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        importlib.invalidate_caches()

    def metadata(
        self,
        distribution: str,
        entry_points: dict[str, str],
        *,
        version: str = "1.0",
        group: str = "deepinfer.plugins.v1",
        form: str = "dist-info",
        root: Path | None = None,
    ) -> Path:
        """Write a metadata folder alone: ``entry_points`` maps names to modules."""
        stem = distribution.replace("-", "_")
        folder = (root or self.root) / (f"{stem}-{version}.dist-info" if form == "dist-info" else f"{stem}.egg-info")
        folder.mkdir(parents=True)
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        about = "METADATA" if form == "dist-info" else "PKG-INFO"
        (folder / about).write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        importlib.invalidate_caches()
        return folder

    def install(self, name: str, source: str, *, distribution: str = "", **how: Any) -> Path:
        """Install a distribution ``<name>-dist`` with one plugin, whose module is ``<name>_plugin``."""
        distribution = distribution or f"{name}-dist"
        module = distribution.replace("-", "_") + "_plugin"
        self.module(module, source)
        return self.metadata(distribution, {name: module}, **how)

    def load(
        self,
        allow: Sequence[str] | None = None,
        block: Sequence[str] = (),
        requested: Sequence[str] | Mapping[str, str] = (),
        **more: Any,
    ) -> Registry:
        """Load from this folder alone, without the core's own plugins."""
        return load_plugins(allow, [*BUILTINS, *block], requested, path=[str(self.root)], **more)
