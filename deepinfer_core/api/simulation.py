"""The request loop without a model: the engine's planner, block pool and prefix cache under a virtual clock.

What a step costs comes from a :class:`CostModel`; what a request asks is its lengths and opaque block keys. The code
that plans, shares blocks and asks the policy is the engine's own. Nothing here needs torch but :func:`profile_steps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from .provider import LazyRef
from .scheduling import Policy

if TYPE_CHECKING:
    import numpy as np


def _least(minimum: int) -> Any:
    return attrs.field(validator=attrs.validators.ge(minimum))


@attrs.frozen(kw_only=True)
class SimulationConfig:
    """Limits of a simulated engine, as the settings ``kv_cache.*`` and ``scheduling.*`` have them.

    Attributes:
        num_blocks: blocks of ``block_size`` tokens, the null block included. One cache group, without a window.
        max_model_len: tokens; None for as much as the cache holds.
    """

    block_size: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    num_blocks: int = attrs.field(default=4097, validator=attrs.validators.ge(2))
    max_batch_tokens: int = attrs.field(default=2048, validator=attrs.validators.ge(1))
    max_running: int = attrs.field(default=256, validator=attrs.validators.ge(1))
    chunked_prefill: bool = True
    prefix_cache: bool = True
    max_model_len: int | None = None


@attrs.frozen(kw_only=True)
class SimulatedRequest:
    """What arrives.

    Attributes:
        id: names it in results; need not be unique. arrival: seconds on the virtual clock.
        prompt: tokens. outputs: tokens that each completion will have, at least one completion.
        max_tokens: what the policy is told; None for the longest of ``outputs``.
        blocks: a number from 0 up for each full block of the prompt, and of the first completion after it, as far as
            they are known. Two requests share the number at a place if and only if they agree on every token up to
            the end of that block.
        deadline: seconds on the virtual clock. ttft_target, tpot_target: seconds.
    """

    id: str
    arrival: float
    prompt: int = _least(1)
    outputs: tuple[int, ...] = (1,)
    max_tokens: int | None = None
    blocks: Sequence[int] = ()
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None


@attrs.frozen
class StepShape:
    """What a step computes.

    Attributes:
        prefill: rows of prompts, or recomputed ones. decode: rows of requests that produce token after token.
        sampled: rows that yield a token.
        prefill_context: positions that the prompt rows attend to, added up. decode_context: the same of decode rows.
    """

    prefill: int
    decode: int
    sampled: int
    prefill_context: int
    decode_context: int

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode


class CostModel(Protocol):
    """What steps cost, in seconds."""

    def seconds(self, shape: StepShape) -> float:
        """One step, everything between its start and the start of the next."""
        ...

    def decode_seconds(self, rows: int, context: int, steps: int) -> np.ndarray[Any, Any]:
        """Steps of decode rows alone, float64 ``[steps]``: the k-th has ``decode_context`` ``context + k * rows``.

        Bitwise the same as asking :meth:`seconds` for each.
        """
        ...


@attrs.frozen(kw_only=True)
class SimulatedResult:
    """What became of a request. Times are seconds on the virtual clock.

    Attributes:
        output: tokens of all completions. longest_output: of the longest one.
        cached: prompt tokens that the prefix cache gave. refused: why it never ran, or None.
    """

    request: SimulatedRequest
    first_scheduled: float | None
    first_token: float | None
    finished: float
    output: int
    longest_output: int
    cached: int
    preemptions: int
    refused: str | None = None

    @property
    def queue_time(self) -> float | None:
        """From arrival to the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.request.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for one token."""
        if self.first_token is None or self.longest_output < 2:
            return None
        return (self.finished - self.first_token) / (self.longest_output - 1)


@attrs.define
class SimulationTotals:
    """Counts so far. ``busy``: seconds spent in steps. ``queried``, ``cached``: tokens of admitted requests."""

    steps: int = 0
    busy: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0
    queried: int = 0
    cached: int = 0
    preemptions: int = 0
    policy_failures: int = 0


class Simulation(Protocol):
    """One engine, driven from outside: add what has arrived, then let time pass."""

    @property
    def now(self) -> float:
        """The virtual clock, seconds."""
        ...

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        ...

    @property
    def outstanding(self) -> int:
        """Tokens that the unfinished requests had to compute when they came: a measure of load."""
        ...

    def add(self, request: SimulatedRequest) -> None:
        """A request arrives now, or did while the last step ran."""
        ...

    def run_until(self, time: float) -> None:
        """Run every step that starts before ``time``; afterwards ``now`` is at least ``time`` (if it is finite)."""
        ...

    def totals(self) -> SimulationTotals: ...


StepWatcher = Callable[[StepShape, float, float], None]
"""Called with each step's shape, start and seconds."""


def open_simulation(
    policy: Policy,
    config: SimulationConfig,
    cost: CostModel,
    on_result: Callable[[SimulatedResult], None],
    *,
    watch: StepWatcher | None = None,
    stepwise: bool = False,
) -> Simulation:
    """A simulated engine, synchronous: a step is planned when the one before it is committed.

    Args:
        on_result: called when a request ends or is refused.
        watch: called for every step.
        stepwise: plan every step, in place of advancing stretches of pure decode at once. The same, only slower.
    """
    opened: Simulation = LazyRef("deepinfer_core.engine.simulated:SimulatedEngine").load()(
        policy, config, cost, on_result, watch=watch, stepwise=stepwise
    )
    return opened


def named_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """A policy as ``scheduling.policy`` names it, with its plugin's settings from the usual sources.

    Args:
        settings: dotted setting -> value, over file and environment (``{"plugins.scheduler.fair_output_weight": 3}``).

    Raises:
        PluginError: nobody has such a policy. ConfigError: a setting is wrong.
    """
    policy: Policy = LazyRef("deepinfer_core.engine.policies:named_policy").load()(name, settings or {})
    return policy


@attrs.frozen(kw_only=True)
class RecordedStep:
    """A step of a recorded trace: rows, prompt rows among them, requests with rows, tokens produced, and its time.

    ``start`` is when it was planned, ``seconds`` how long until its result was known.
    """

    start: float
    seconds: float
    tokens: int
    prefill: int
    requests: int
    output: int


@attrs.frozen(kw_only=True)
class RecordedTrace:
    """What ``--record-trace`` wrote. ``steps_before[i]``: steps that had ended when ``requests[i]`` was queued."""

    config: SimulationConfig
    policy: str
    requests: tuple[SimulatedRequest, ...]
    steps_before: tuple[int, ...]
    steps: tuple[RecordedStep, ...]
    unfinished: int


def read_recorded(path: str | Path) -> RecordedTrace:
    """Read a recorded trace. Requests that had not ended when it was cut off are left out and counted.

    Raises:
        ConfigError: the file cannot be read or is no such trace; names line and field.
    """
    trace: RecordedTrace = LazyRef("deepinfer_core.engine.recorded:read_recorded").load()(path)
    return trace


def replay(
    trace: RecordedTrace, policy: Policy, on_result: Callable[[SimulatedResult], None]
) -> Sequence[RecordedStep]:
    """The steps that the simulator makes of a synchronous engine's trace, given how long each of its steps took."""
    steps: Sequence[RecordedStep] = LazyRef("deepinfer_core.engine.recorded:replay").load()(trace, policy, on_result)
    return steps


@attrs.frozen(kw_only=True)
class StepSample:
    """A measured step: its shape and the seconds between its start and the start of the next."""

    shape: StepShape
    seconds: float


@attrs.frozen(kw_only=True)
class StepProfile:
    """Steps of a real engine. ``facts`` say which one: model, accelerator, dtype, limits."""

    facts: Mapping[str, Any]
    samples: Sequence[StepSample]


def profile_steps(
    settings: Mapping[str, Any],
    *,
    rounds: int,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    seconds: float | None = None,
    share: Callable[[float], None] | None = None,
) -> StepProfile:
    """Load a model and measure steps over a grid of prompt rows, decode rows and contexts. Needs torch.

    Args:
        settings: dotted setting -> value; ``model.path`` at least.
        rounds: how often each point of the grid is measured.
        progress: told what is measured next.
        clock: seconds. ``time.process_time`` leaves out what other processes take of a shared host.
        seconds: for all of it, compiling and loading apart: points of the grid that would take longer are left out,
            largest first, but for the smallest eight. None: the whole grid.
        share: told the share of the work that is done, from 0 to 1.

    Raises:
        DeepInferError: the engine cannot be opened.
    """
    profile: StepProfile = LazyRef("deepinfer_core.engine.step_profile:profile_steps").load()(
        settings, rounds=rounds, progress=progress, clock=clock, seconds=seconds, share=share
    )
    return profile


def run_simulation(simulation: Simulation, requests: Iterable[SimulatedRequest]) -> None:
    """Let requests arrive in order of time, and run until all have ended."""
    for request in requests:
        simulation.run_until(request.arrival)
        simulation.add(request)
    simulation.run_until(float("inf"))
