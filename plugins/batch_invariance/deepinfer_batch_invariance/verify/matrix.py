"""The kinds of company a request is run in, and what must be the same bits in all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from deepinfer_core.api import CommandHost

from .record import Moved, Recorder

BATCHES = (2, 16, 44)
LARGE_BATCHES = (255, 256, 257)
CHUNKS = (5, 16, 33)
NEIGHBOUR_TOKENS = 4

Settings = Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Probe:
    """A request that is watched: token ids and sampling parameters."""

    prompt: tuple[int, ...]
    params: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Scenario:
    """One kind of company.

    Attributes:
        settings: of the engine, above the user's own.
        batches: requests of each run; the probes stand first, last or in the middle of them in turn.
        repeat: runs before the one that is compared, for the prefix cache to be warm.
        pool: tokens per block -> blocks of the cache, where the scenario is about a small one.
        happened: whether the run's outputs show what the scenario is for; otherwise it proves nothing.
    """

    name: str
    settings: Settings = attrs.field(factory=dict)
    batches: tuple[int, ...] = (1,)
    repeat: int = 0
    pool: Callable[[int], int] | None = None
    happened: Callable[[Sequence[Any]], bool] = attrs.field(default=lambda outputs: True)


@attrs.frozen(kw_only=True)
class Result:
    """What a scenario showed.

    Attributes:
        runs: requests compared. results: operator results compared, row by row.
        differing: requests whose tokens or log-probabilities were not the same bits.
        moved: where the first bit moved, if the operators were watched and one did.
        happened: False when the scenario did not come about.
    """

    name: str
    runs: int
    results: int
    differing: int
    moved: Moved | None
    happened: bool


def scenarios(prompt_tokens: int, max_tokens: int, *, large: bool, more: Mapping[str, Settings]) -> list[Scenario]:
    """All kinds.

    Args:
        prompt_tokens, max_tokens: of the probes.
        more: name -> settings of further scenarios (a drafter, a policy).
    """

    def tight(block: int) -> int:
        """A pool that takes two prompts in and then holds one whole request."""
        return 1 + max(-(-(prompt_tokens + max_tokens) // block), 2 * -(-prompt_tokens // block))

    own = [  # first, so that a setting that does not exist is known at once
        Scenario(
            name=name,
            settings=settings,
            batches=(1, 4),
            happened=_any(_drafted) if "speculation.method" in settings else _always,
        )
        for name, settings in more.items()
    ]
    chosen = [
        *own,
        Scenario(name="in a batch", batches=BATCHES),
        *(
            Scenario(name=f"prefill in chunks of {n}", settings={"scheduling.max_batch_tokens": n}, batches=(1, 3))
            for n in CHUNKS
        ),
        Scenario(name="from a prefix-cache hit", repeat=1, happened=_any(lambda m: m.cached_tokens > 0)),
        Scenario(name="without a prefix cache", settings={"kv_cache.prefix_cache": False}),
        Scenario(
            name="preempted and resumed",
            settings={"kv_cache.prefix_cache": False},
            pool=tight,
            batches=(3, 8),
            happened=_any(lambda m: m.preemptions > 0),
        ),
        Scenario(name="one step ahead", settings={"scheduling.async_scheduling": True}, batches=(1, 5)),
        Scenario(name="synchronous", settings={"scheduling.async_scheduling": False}, batches=(1, 5)),
    ]
    if large:
        chosen.append(Scenario(name="in a large batch", batches=LARGE_BATCHES))
    return chosen


def _drafted(metrics: Any) -> bool:
    accepted: int = metrics.accepted_drafts
    return accepted > 0


def _always(_: Sequence[Any]) -> bool:
    return True


def _any(holds: Callable[[Any], bool]) -> Callable[[Sequence[Any]], bool]:
    return lambda outputs: any(holds(output.metrics) for output in outputs)


@attrs.define
class Matrix:
    """Runs probes alone, then in every scenario, each in an engine of its own.

    Attributes:
        settings: of all engines. watch: digest every operator's results, to find where a bit moved.
    """

    host: CommandHost
    model: str
    settings: Settings
    probes: Sequence[Probe]
    watch: bool = True

    def run(self, chosen: Sequence[Scenario]) -> Iterator[Result]:
        """The results, in order. The probes alone come first and are what the others are compared with."""
        recorder = Recorder([probe.prompt for probe in self.probes]) if self.watch else None
        with self._open({"kv_cache.prefix_cache": False}, recorder) as llm:
            alone = [_facts(self._generate(llm, [probe])[0]) for probe in self.probes]
            block: int = llm.engine.planned.config.kv_cache.block_size
        for scenario in chosen:
            if recorder is not None:
                recorder.forget_differences()
            pool = {} if scenario.pool is None else {"kv_cache.num_blocks": scenario.pool(block)}
            with self._open({**scenario.settings, **pool}, recorder) as llm:
                yield self._compared(llm, scenario, alone, recorder)

    def _compared(self, llm: Any, scenario: Scenario, alone: list[Any], recorder: Recorder | None) -> Result:
        runs, differing, seen = 0, 0, []
        for number, size in enumerate(scenario.batches):
            for company in self._companies(size, number):
                for _ in range(scenario.repeat):
                    self._generate(llm, company)
                for request, output in zip(company, self._generate(llm, company), strict=True):
                    seen.append(output)
                    if request in self.probes:
                        runs += 1
                        differing += _facts(output) != alone[self.probes.index(request)]
        return Result(
            name=scenario.name,
            runs=runs,
            results=0 if recorder is None else recorder.compared,
            differing=differing,
            moved=None if recorder is None else recorder.first(),
            happened=scenario.happened(seen),
        )

    def _companies(self, size: int, number: int) -> Iterator[list[Probe]]:
        """Batches of ``size`` requests with every probe in it, at the front, at the back, or in the middle."""
        if size == 1:
            yield from ([probe] for probe in self.probes)
            return
        neighbours = [self._neighbour(size, i) for i in range(max(size - len(self.probes), 1))]
        place = (0, len(neighbours), len(neighbours) // 2)[number % 3]
        yield [*neighbours[:place], *self.probes, *neighbours[place:]]

    def _neighbour(self, size: int, index: int) -> Probe:
        source = random.Random(f"{size} {index}")
        highest = max(max(probe.prompt) for probe in self.probes)
        prompt = tuple(source.randrange(highest + 1) for _ in range(source.randrange(1, 40)))
        params = {"temperature": source.choice((0, 0.7)), "seed": index, "ignore_eos": True}
        return Probe(prompt=prompt, params={**params, "max_tokens": source.randrange(1, 2 * NEIGHBOUR_TOKENS)})

    def _open(self, settings: Settings, recorder: Recorder | None) -> Any:
        wanted = {"features.batch_invariant": True, **self.settings, **settings}
        return self.host.open_llm(self.model, wanted, None if recorder is None else recorder.wrap)

    def _generate(self, llm: Any, requests: Sequence[Probe]) -> list[Any]:
        prompts = [list(request.prompt) for request in requests]
        params = [self.host.sampling_params(**request.params) for request in requests]
        outputs: list[Any] = llm.generate(prompts, params, progress=False)
        return outputs


def _facts(output: Any) -> Any:
    """All that must be equal: tokens, and log-probabilities to the last bit."""
    completions = [(c.token_ids, _exact(c.logprobs), c.finish_reason) for c in output.outputs]
    return completions, _exact(output.prompt_logprobs), output.error


def _exact(entries: Any) -> Any:
    return [
        None if e is None else sorted((token, lp.logprob.hex(), lp.rank) for token, lp in e.items())
        for e in entries or ()
    ]
