"""Writes new projects: a backend, or a plugin of one kind, that works before a line of it is changed."""

from __future__ import annotations

from .backend import FAMILIES, Family, new_backend
from .plugin import KINDS, new_plugin

__all__ = ["FAMILIES", "KINDS", "Family", "new_backend", "new_plugin"]
