"""What users may set: ``plugins.nvidia_sm100.<field>``."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of this backend.

    Attributes:
        table: file that ``deepinfer tune`` made; its shapes come before those of the package's own.
    """

    table: str | None = None
