"""What users may set: ``plugins.nvidia_sm100.<field>``."""

from __future__ import annotations

from typing import Any

import attrs

from . import table_file


def _readable(_: Any, __: Any, path: str | None) -> None:
    if path is not None:
        try:
            table_file.read(path)
        except table_file.BadTable as error:
            raise ValueError(f"table {path}: {error}") from error


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of this backend.

    Attributes:
        table: file that ``deepinfer tune`` made; its shapes come before those of the package's own. A tile that no
            GPU can run is an error.
    """

    table: str | None = attrs.field(default=None, validator=_readable)
