"""What is wrong with this installation, and the command that mends it.

Plugins are strangers' code, and native code can hang or end a process: everything of theirs runs in child processes
with a timeout. The process that asks imports no plugin and no torch.
"""

from __future__ import annotations

from .examine import examine
from .finding import Diagnosis, Examined, Finding, Severity

__all__ = ["Diagnosis", "Examined", "Finding", "Severity", "examine"]
