"""The invariants of a scheduling policy as results of the kit: ``--policy module:Class``."""

from __future__ import annotations

import importlib
import time
from typing import Any

from deepinfer_core.api import ConfigError, PluginError

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
    except (ImportError, AttributeError, PluginError, TypeError, ValueError) as error:
        raise ConfigError(f"--policy {policy!r}: {error}; expected 'module:Class' or an installed policy") from error
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
