"""Which cases there are, and running them. Imports torch only when a case does."""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core import __version__
from deepinfer_core.api import API_VERSION, ConfigError, DeviceError
from deepinfer_core.plugins.nearest import suggest

from .case import Case, Mismatch, NotApplicable, Refused, Tier, asked
from .gaps import Gap, check_names
from .policies import policy_results
from .report import Outcome, Report, Result
from .side_by_side import Asked, ask_side_by_side

if TYPE_CHECKING:
    from .target import Target

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "hygiene": ("hygiene",),
    "pointwise": (
        "operators.pointwise",
        "operators.rotary",
        "operators.hyper_connection",
        "operators.quantise",
    ),
    "gemm": ("operators.gemm",),
    "fused": ("operators.fused", "operators.between_attention"),
    "kv_layout": ("operators.kv_layout",),
    "attention": ("operators.attention_checks", "operators.sparse", "operators.compress"),
    "moe": ("operators.moe",),
    "moe_communication": ("operators.expert_parallel",),
    "runner": ("operators.runner",),
    "sampling": ("operators.sampling", "operators.draw", "operators.verify"),
    "model": ("model",),
}
"""Family -> modules of this package whose ``cases(dtype)`` lists its cases."""

Progress = Callable[[Result, int, int], None]


def run(
    backend: str | None,
    *,
    tier: Tier = "boots",
    families: Sequence[str] = (),
    gaps: Sequence[Gap] = (),
    plugins: Sequence[str] = (),
    providers: Sequence[str] = (),
    demands: Sequence[str] = (),
    policy: str | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
) -> Report:
    """Run the kit against an installed backend, a scheduling policy, or both.

    Args:
        backend: as after ``--accelerator``; ``"reference"``: the reference operators on the host; None: no backend.
        families: families or operators (``"attention"``, ``"gemm.linear"``); none: all.
        gaps: known gaps; see :mod:`deepinfer_core.conformance.gaps`.
        plugins: plugins that are not installed: a dotted module or a ``.py`` file each.
        providers: ``plugin:provider`` to ask wherever they take a request, whatever their scores: those that are chosen
            on request only, too.
        demands: caps that every provider must have (``"batch_invariant"``): those that have them are asked.
        policy: ``"module:Class"`` or an installed policy's name, whose invariants are checked too.
        progress: called after each case with its result, how many are done, and how many there are.
        jobs: processes that ask at the same time, each with the backend opened for itself.

    Raises:
        ConfigError: an unknown family or policy, a demand that nobody meets, or a gap that names no case.
        PluginError: the backend is broken. DeviceError: it has no device here, and more than hygiene was asked.
    """
    if backend is None and policy is None:
        raise ConfigError("nothing to ask: name a backend or a policy")
    about_policy = policy_results(policy) if policy is not None else ()
    if backend is None:
        return policy_report(str(policy), tier, about_policy)
    target = open_for(backend, families, plugins, providers)
    target.demands = frozenset(demands)
    try:
        _check_demands(target)
        if jobs > 1:
            asked = Asked(
                backend=backend,
                tier=tier,
                families=tuple(families),
                gaps=tuple(gaps),
                plugins=tuple(plugins),
                providers=tuple(providers),
                demands=tuple(demands),
            )
            check_names(gaps, [case.id for case in all_cases(target.dtype)])
            start = time.perf_counter()
            results = ask_side_by_side(asked, select(tier, families, target.dtype), jobs, progress)
            report = make_report(target, tier, results, time.perf_counter() - start)
        else:
            report = run_on(target, tier=tier, families=families, gaps=gaps, progress=progress)
    finally:
        target.close()
    return attrs.evolve(report, results=report.results + about_policy)


def _check_demands(target: Target) -> None:
    caps = {cap for _, provider in target.providers for cap in provider.caps}
    for demand in sorted(target.demands - caps):
        raise ConfigError(f"--demand {demand!r}: no provider has this cap{suggest(demand, caps)}")


def policy_report(policy: str, tier: str, results: Sequence[Result]) -> Report:
    """A report about a policy alone: no device took part."""
    return Report(
        backend=policy,
        tier=tier,
        device={},
        versions=core_versions(),
        results=tuple(results),
        seconds=sum(result.seconds for result in results),
    )


def open_for(backend: str, families: Sequence[str], plugins: Sequence[str], providers: Sequence[str] = ()) -> Target:
    """The backend's target. Hygiene alone needs no device, and is asked on machines that have none."""
    from .target import open_target, open_without_device

    try:
        return open_target(backend, plugins, providers)
    except DeviceError:
        if list(families) != ["hygiene"]:
            raise
        return open_without_device(backend, plugins)


def run_on(
    target: Target,
    *,
    tier: Tier = "boots",
    families: Sequence[str] = (),
    gaps: Sequence[Gap] = (),
    progress: Progress | None = None,
) -> Report:
    """As :func:`run`, on a target that is open already and stays open."""
    cases = select(tier, families, target.dtype)
    check_names(gaps, [case.id for case in all_cases(target.dtype)])
    start = time.perf_counter()
    results = []
    for case in cases:
        results.append(ask(case, target, gaps))
        if progress is not None:
            progress(results[-1], len(results), len(cases))
    return make_report(target, tier, results, time.perf_counter() - start)


def make_report(target: Target, tier: str, results: Sequence[Result], seconds: float) -> Report:
    """The results of a run with what is needed to repeat it."""
    return Report(
        backend=target.backend,
        tier=tier,
        device=device_facts(target),
        versions=versions(target),
        results=tuple(results),
        seconds=seconds,
    )


def all_cases(dtype: str = "float32") -> list[Case]:
    """Every case of every tier, for a backend whose own compute dtype is this."""
    found = list(_cases(tuple(FAMILIES), dtype))
    names = [case.id for case in found]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    return found


def select(tier: Tier, families: Sequence[str] = (), dtype: str = "float32") -> list[Case]:
    """The cases of a tier, of some families or operators.

    Raises:
        ConfigError: a family that does not exist.
    """
    wanted = list(families) or list(FAMILIES)
    modules = dict.fromkeys(name.partition(".")[0] for name in wanted)
    for name in wanted:
        if name.partition(".")[0] not in FAMILIES:
            raise ConfigError(f"--family {name!r}: unknown; use one of {', '.join(FAMILIES)}, or an operator's name")
    cases = [case for case in _cases(tuple(modules), dtype) if asked(case.tier, tier)]
    chosen = [case for case in cases if any(name in (case.family, case.operator) for name in wanted)]
    for name in families:
        if not any(name in (case.family, case.operator) for case in chosen):
            raise ConfigError(f"--family {name!r}: no case of tier {tier} belongs to it")
    return chosen


def _cases(families: tuple[str, ...], dtype: str) -> Iterator[Case]:
    for family in families:
        for name in FAMILIES[family]:
            yield from importlib.import_module(f"{__package__}.{name}").cases(dtype)
    drawn = importlib.import_module(f"{__package__}.operators.drawn").cases(dtype)
    yield from (case for case in drawn if case.family in families)


def ask(case: Case, target: Target, gaps: Sequence[Gap] = ()) -> Result:
    """Put one case to a target. Never raises but for KeyboardInterrupt."""
    start = time.perf_counter()
    outcome, message = _outcome(case, target)
    gap = next((gap for gap in gaps if gap.case == case.id), None)
    if gap is not None and outcome in ("failed", "refused"):
        link = f" ({gap.link})" if gap.link else ""
        outcome, message = "known_gap", f"{gap.reason}{link}; it says: {message}"
    elif gap is not None and outcome == "passed":
        outcome, message = "failed", f"passes now, but the gaps file says {gap.reason!r}: remove its entry"
    return Result(
        case=case.id,
        family=case.family,
        outcome=outcome,
        message=message,
        seconds=round(time.perf_counter() - start, 4),
    )


def _outcome(case: Case, target: Target) -> tuple[Outcome, str]:
    try:
        return "passed", case.check(target)
    except NotApplicable as error:
        return "skipped", str(error)
    except Refused as error:
        if case.required:
            return "failed", f"refused, and tier {case.tier} must not refuse it: {error}"
        return "refused", str(error)
    except Mismatch as error:
        return "failed", str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a stranger's operator raises is its verdict, not the kit's end
        lines = str(error).strip().splitlines() or [""]
        return "failed", f"{case.operator} raised {type(error).__name__}: {lines[0]}"


def device_facts(target: Target) -> dict[str, str]:
    info = target.device.info
    return {
        "device": info.evidence,
        "architecture": info.arch,
        "torch device": info.type,
        "compute dtype": target.dtype,
    }


def versions(target: Target) -> dict[str, str]:
    import torch

    record: Any = target.registry.plugins.get(target.plugin) if target.registry is not None else None
    own = {} if record is None else {record.record.distribution: record.record.version}
    return {**own, **core_versions(), "torch": torch.__version__}


def core_versions() -> dict[str, str]:
    return {
        "deepinfer-core": __version__,
        "interface": ".".join(map(str, API_VERSION)),
        "python": platform.python_version(),
    }
