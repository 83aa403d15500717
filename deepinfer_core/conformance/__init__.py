"""The conformance kit: a suite that a backend's authors run against their own package, and a verdict to publish.

    deepinfer conformance acme --tier boots
    pytest --pyargs deepinfer_core.conformance --backend acme --tier boots

>>> from deepinfer_core.conformance import run
>>> print(run("acme", tier="boots").table())

Importing this package imports no torch.
"""

from __future__ import annotations

from .case import TIERS, Case, Tier
from .gaps import Gap, read_gaps
from .kit import FAMILIES, all_cases, run
from .report import Outcome, Report, Result

__all__ = [
    "FAMILIES",
    "TIERS",
    "Case",
    "Gap",
    "Outcome",
    "Report",
    "Result",
    "Tier",
    "all_cases",
    "read_gaps",
    "run",
]
