"""Commands that plugins add to the ``deepinfer`` program."""

from __future__ import annotations

import attrs

from .provider import LazyRef


@attrs.frozen(kw_only=True)
class CommandInfo:
    """Declared by ``deepinfer_commands``. ``command`` names a ``click.Command``, imported when it is run."""

    name: str
    help: str
    command: LazyRef
