"""The invariants of a scheduling policy as results of the kit: ``--policy module:Class``."""

from __future__ import annotations

import importlib
import time
from typing import Any

from deepinfer_core.api import ConfigError
from deepinfer_core.plugins.failure import cause_line

from .report import Result

FAMILY = "policy"


def policy_results(policy: str) -> tuple[Result, ...]:
    """One result for each invariant.

    Args:
        policy: ``"module:Class"``, or the name of an installed policy.

    Raises:
        ConfigError: there is no such policy.
    """
    suite: Any = importlib.import_module(f"{__package__}.policy")
    start = time.perf_counter()
    try:
        suite.policy_factory(policy)()
    except (SystemExit, Exception) as error:
        given = f"{policy!r}: {cause_line(error)}; a class is made with None for its settings, or with nothing"
        raise ConfigError(
            f"--policy {given}: expected 'module:Class' for one, or an installed policy's name"
        ) from error
    report = suite.check_policy(policy)
    seconds = round((time.perf_counter() - start) / len(suite.CHECKS), 4)
    times = ", ".join(f"{question} {took * 1e3:.2f} ms" for question, took in report.call_seconds.items())
    results = []
    for check, holds in suite.CHECKS.items():
        found = [finding.detail for finding in report.findings if finding.check == check]
        message = f"{policy} {'; '.join(found)}; expected: {holds}" if found else f"{policy} {holds}"
        if check == "slow":
            message += f" (with {suite.HUGE_WAITING} waiting and {suite.HUGE_RUNNING} running: {times})"
        results.append(
            Result(
                case=f"policy/{check}",
                family=FAMILY,
                outcome="failed" if found else "passed",
                message=message,
                seconds=seconds,
            )
        )
    return tuple(results)
