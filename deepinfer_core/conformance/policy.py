"""The invariants of a scheduling policy, checked on made-up views and in the simulator.

    deepinfer conformance --policy my_module:MyPolicy

``check_policy`` is the same as a function. It asks the policy thousands of questions, compares two instances, lets it
schedule an overloaded engine, and names what it finds.
"""

from __future__ import annotations

import inspect
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import attrs
import numpy as np

from deepinfer_core.api import (
    Admit,
    EventKind,
    LazyRef,
    PluginError,
    Policy,
    SchedulingEvent,
    SystemView,
    TokenSplit,
)
from deepinfer_core.api.simulation import named_policy

from .policy_progress import progress_findings
from .policy_views import TENANTS, random_request, random_view

PolicyFactory = Callable[[], Policy]
HUGE_WAITING, HUGE_RUNNING = 10_000, 256
SLOW_SECONDS = 0.1
"""Median of a call's time on a huge view above which a policy is called slow. A good one takes less than 0.001."""

CHECKS: Mapping[str, str] = {
    "raises": "no question makes it raise, on an empty view or a huge one either",
    "order": "order answers at most k distinct indices of waiting requests",
    "split": "split answers two shares from 0 to max_batch_tokens",
    "victims": "victims answers distinct indices of running requests that hold enough blocks, or all of them",
    "admit": "admit answers an Admit, and a refusal has a reason",
    "deterministic": "two instances that saw the same answer the same",
    "drops": "no request without a deadline is refused by an idle engine",
    "starves": "every request comes to run, however many others keep coming",
    "slow": f"no call takes more than {SLOW_SECONDS} s with {HUGE_WAITING} waiting and {HUGE_RUNNING} running",
}
"""Check -> what holds when it passes."""


@attrs.frozen
class Finding:
    """A check that failed, and how."""

    check: str
    detail: str


@attrs.frozen(kw_only=True)
class PolicyReport:
    """``call_seconds``: median seconds of each question with 10,000 waiting and 256 running requests; a figure to
    look at, since it depends on the machine."""

    findings: tuple[Finding, ...]
    call_seconds: Mapping[str, float]

    @property
    def passed(self) -> bool:
        return not self.findings


def check_policy(
    policy: str | PolicyFactory, *, views: int = 60, seed: int = 0, patience: float = 60.0
) -> PolicyReport:
    """Check a policy.

    Args:
        policy: ``"module:Class"``, the name of an installed policy, or what makes an instance.
        views: how many made-up views are asked about.
        patience: seconds for which it may let a request wait beyond what overload makes everybody wait.

    Raises:
        ImportError, AttributeError: there is no such module or class. PluginError: there is no such policy.
    """
    make = policy_factory(policy) if isinstance(policy, str) else policy
    found: dict[tuple[str, str], Finding] = {}

    def note(findings: Iterator[Finding]) -> None:
        for finding in findings:
            found.setdefault((finding.check, finding.detail.partition(":")[0]), finding)

    random = np.random.default_rng(seed)
    first, second = make(), make()
    for view in _views(random, views):
        note(check_view(first, second, view, random))
    note(_check_events(make()))
    call_seconds = _measure(make(), random)
    slow = [f"{question}: {seconds:.3f} s" for question, seconds in call_seconds.items() if seconds > SLOW_SECONDS]
    note(Finding("slow", detail) for detail in slow)
    if not slow:  # or the simulation would take for ever
        note(Finding(check, detail) for check, detail in progress_findings(make, patience))
    return PolicyReport(findings=tuple(found.values()), call_seconds=call_seconds)


def policy_factory(target: str, settings: Mapping[str, Any] | None = None) -> PolicyFactory:
    """What makes instances of ``module:Class`` (or of any callable named so), or of an installed policy.

    ``plugin:policy`` also has a colon: it is meant where there is no such class. ``settings`` are for installed ones.

    Raises:
        ImportError, AttributeError: there is no such class.
        TypeError: from what is returned: the class takes other arguments, or makes no policy.
    """
    if ":" not in target:
        return lambda: named_policy(target, settings)
    try:
        made: Callable[..., Policy] = LazyRef(target).load()
    except (ImportError, AttributeError) as error:
        try:
            named_policy(target, settings)
        except PluginError:
            raise error from None
        return lambda: named_policy(target, settings)
    takes_settings = bool(inspect.signature(made).parameters)

    def make() -> Policy:
        policy = made(None) if takes_settings else made()
        missing = [name for name in ("admit", "order", "split", "victims", "on_event") if not hasattr(policy, name)]
        if missing:
            raise TypeError(f"it makes a {type(policy).__name__}, which has no {', '.join(missing)}")
        return policy

    return make


def check_view(policy: Policy, twin: Policy, view: SystemView, random: np.random.Generator) -> Iterator[Finding]:
    """Ask both instances every question about a view. Views must come in the same order for both."""
    waiting, running = len(view.waiting.ids), len(view.running.ids)
    k, need = int(random.integers(1, view.max_running + 1)), int(random.integers(1, view.total_blocks + 1))
    request = random_request(random, view)
    questions: tuple[tuple[str, Callable[[Policy], Any], Callable[[Any], str | None]], ...] = (
        ("admit", lambda p: p.admit(request, view), _wrong_admit),
        ("order", lambda p: list(p.order(view, k)), lambda answer: _wrong_indices(answer, waiting, k)),
        ("split", lambda p: p.split(view), lambda answer: _wrong_split(answer, view.max_batch_tokens)),
        (
            "victims",
            lambda p: list(p.victims(view, need)) if running else [],
            lambda answer: _wrong_indices(answer, running, running) or _too_few(answer, view, need),
        ),
    )
    for name, ask, judge in questions:
        try:
            answer, again = ask(policy), ask(twin)
        except (Exception, SystemExit) as error:
            yield Finding("raises", f"{name}: {type(error).__name__}: {error} ({_sizes(view)})")
            continue
        wrong = judge(answer)
        if wrong is not None:
            yield Finding(name, f"{wrong} ({_sizes(view)})")
        elif answer != again:
            yield Finding("deterministic", f"{name}: one instance answered {answer!r:.60}, the other {again!r:.60}")


def _views(random: np.random.Generator, count: int) -> Iterator[SystemView]:
    yield random_view(random, waiting=0, running=0)
    yield random_view(random, waiting=HUGE_WAITING, running=HUGE_RUNNING)
    for _ in range(count):
        waiting, running = int(random.choice([0, 1, 2, 30, 400])), int(random.choice([0, 1, 2, 16, 256]))
        yield random_view(random, waiting=waiting, running=running)


def _sizes(view: SystemView) -> str:
    return f"{len(view.waiting.ids)} waiting, {len(view.running.ids)} running, {view.free_blocks} blocks free"


def _wrong_admit(answer: Any) -> str | None:
    if not isinstance(answer, Admit):
        return f"not an Admit: {answer!r}"
    return None if answer.accepted or answer.reason else "refused without a reason"


def _wrong_indices(answer: list[Any], count: int, most: int) -> str | None:
    try:
        indices = [operator.index(i) for i in answer]
    except TypeError:
        return f"not whole numbers: {answer!r:.80}"
    if len(indices) > most:
        return f"too many: {len(indices)}, at most {most} were asked for"
    wrong = [i for i in indices if not 0 <= i < count]
    if wrong:
        return f"out of range: {wrong[0]}, there are {count}"
    repeated = [i for i in set(indices) if indices.count(i) > 1] if len(set(indices)) < len(indices) else []
    return f"repeated: index {repeated[0]}" if repeated else None


def _wrong_split(answer: Any, budget: int) -> str | None:
    if not isinstance(answer, TokenSplit):
        return f"not a TokenSplit: {answer!r}"
    for part in (answer.decode, answer.prefill):
        if isinstance(part, float) or not 0 <= part <= budget:
            return f"over the budget: {answer}, a step has {budget} tokens"
    return None


def _too_few(answer: list[int], view: SystemView, need: int) -> str | None:
    held = int(view.running.blocks[[int(i) for i in answer]].sum()) if answer else 0
    if held >= need or len(answer) == len(view.running.ids):
        return None
    return f"too few: they hold {held} blocks, {need} are needed, and not all running requests are named"


def _check_events(policy: Policy) -> Iterator[Finding]:
    for number, kind in enumerate(get_args(EventKind)):
        event = SchedulingEvent(kind=kind, request_id="1", time=float(number), tokens=7, tenant=TENANTS[1])
        try:
            policy.on_event(event)
        except (Exception, SystemExit) as error:
            yield Finding("raises", f"on_event {kind}: {type(error).__name__}: {error}")


def _measure(policy: Policy, random: np.random.Generator, repeat: int = 5) -> dict[str, float]:
    """Median seconds of each question on a huge view."""
    view = random_view(random, waiting=HUGE_WAITING, running=HUGE_RUNNING)
    request = random_request(random, view)
    questions: dict[str, Callable[[], object]] = {
        "admit": lambda: policy.admit(request, view),
        "order": lambda: policy.order(view, HUGE_RUNNING),
        "split": lambda: policy.split(view),
        "victims": lambda: policy.victims(view, 8),
    }
    return {name: statistics.median(_seconds(ask) for _ in range(repeat)) for name, ask in questions.items()}


def _seconds(ask: Callable[[], object]) -> float:
    started = time.perf_counter()
    try:
        ask()
    except (Exception, SystemExit):
        return 0.0  # reported as what raises
    return time.perf_counter() - started
