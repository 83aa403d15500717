"""Confidence-scheduled verification: verify what pays, draft only while that can be expected to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from deepinfer_core.api import MeasureStep, VerifyCost

from .budget import Cost, allocate, early_stop_budget, gain, global_budget, usable
from .cost_cache import cache_directory, file_name, load, save
from .cost_table import StepCosts, measure_draft_share, measure_table
from .memory import DraftMemory
from .settings import Settings

Array = np.ndarray[Any, Any]

SECONDS_TO_MEASURE = 4.0
SIZES = "all over the range, quick ones in every turn; drafts apart"
"""What is measured, and how sizes are chosen where there is no time for all."""

ENOUGH = 8
"""Drafts from which on what they say of the next ones is believed."""

REMEMBERED = 32
"""Of the last drafts, at least, while drafting goes on: one request's text is uneven."""

ASKED_EACH = 8
"""New drafts after which it is asked again whether to go on drafting."""

KEPT_WHEN_STOPPED = 4
"""Of them: few, so that the next probe decides."""

PROBED = 2
"""Requests that a probe drafts for, at most."""

PROBE_SHARE = 0.005
"""Of the time, at most, is spent on probes, those of new requests and what they absorb included."""
HOPELESS = 0.8
"""Where what is remembered of grown requests promises less than this ratio, new ones are no reason to find out, and at
first no more drafts are needed to stop."""
YOUNG = 16
"""Rounds of drafting in which requests that were all new are believed to do better yet."""
CLEARLY = 0.9
"""For so long drafting ends only below this ratio, drafts of others counted in, if what is known of grown text pays or
is of as few rounds."""
LITTLE = 64
"""Drafts of grown text. As long as fewer are known, they are made unless they promise less than :data:`HOPELESS`:
little is lost by that, and once, and their mean does not yet tell how a text goes on."""
SHORT = 4
"""Steps that drafted for all requests: where drafting stops sooner, beginning was an error of few drafts, and what it
took counts as a probe's."""
MOST_HALVINGS = 3
"""Each probe in vain doubles the pause until the next, so many times at most."""


class ConfidenceSchedule:
    """The :class:`DraftSchedule` of every drafter here.

    Whether to draft at all is asked of what was drafted lately: the survival of those drafts, for as many requests as
    there are now, against the cost of verifying and of drafting. Where all requests are new, and again where they have
    grown, what was drafted for others of that age over a longer time says what to expect, until there are drafts of
    their own. Before anything is known, and now and then while drafting does not pay, a few requests are drafted for to
    find out: once or twice at first, where the answer is clear. Until enough is known of how texts go on, drafts are
    made unless they promise far too little.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen: deque[Array] = deque()
        self._memory = DraftMemory()
        self._others = 0  # of those seen, how many are of other requests and stand for these
        self._young = False  # all requests are at the beginning of their text
        self._unprobed = False  # they were, and nothing is known of what follows
        self._count = 0
        self._rounds = 0  # of drafting
        self._began_at = 0  # the rounds before all requests were new
        self._on = True
        self._idle_steps = 0
        self._clock = 0.0  # seconds in steps
        self._probed = 0.0  # the clock at the last probe
        self._probe_seconds = 0.0  # what that took
        self._in_vain = 0
        self._learned_on = 0
        self._by_probe = False  # drafting began since a probe promised much, not what others' drafts say
        self._spent_on = 0.0  # seconds of drafting and verifying since then
        self._learned = False  # what drafters say is what was accepted of their drafts
        self._costs_began(StepCosts([(1, 1.0)]))

    def _costs_began(self, costs: StepCosts) -> None:
        self.costs = costs
        self._asked: tuple[int, int] | None = None
        self._answer = True
        self._promised: tuple[tuple[int, int], float] | None = None

    def start(self, measure: MeasureStep, rows: Sequence[int], key: Mapping[str, str]) -> str:
        key = {**key, "sizes": SIZES}
        directory = cache_directory(self._settings.cost_cache)
        path = None if directory is None else directory / file_name(key, rows)
        known = None if path is None else load(path, self._settings.cost_cache_hours * 3600)
        source = f"cached in {path}"
        if known is None:
            table = measure_table(measure, rows, SECONDS_TO_MEASURE)
            if not table:
                return "none: the memory has no room for a step of one row; every row is taken to cost the same"
            known = table, measure_draft_share(measure, table)
            source = f"measured now, {len(table)} step sizes up to {table[-1][0]} rows"
            if path is not None and (why := save(path, key, *known)):
                source += f", and again at the next start: plugins.spec_decode.cost_cache {path.parent}: {why}"
        costs = StepCosts(*known)
        self._costs_began(costs)
        cheaper = f"; a draft costs {costs.draft_share:.2f} of a request's row" if costs.draft_share < 1 else ""
        return source + cheaper

    def budget(self, survival: Array, caps: Array, rows: int, *, delayed: bool) -> int:
        if self._learned and not self._on:
            return int(caps.sum())  # a probe tells nothing unless it is verified
        search = global_budget if delayed else early_stop_budget
        return search(survival, caps, rows, self._round_costs(rows))

    def _round_costs(self, requests: int) -> Cost:
        """Seconds of a round by its rows. While each step drafts for the next, that is part of every round."""
        drafting = self.costs.drafting(requests) if self._on else 0.0
        return lambda rows: self.costs.verifying(requests, rows) + drafting

    def drafts(self, requests: int, fresh: int) -> int:
        few = min(requests, PROBED)
        self._grow(young=fresh == requests)
        if self._finds_out() and (requests <= ENOUGH or self._may_pay(requests)):
            return few
        if self._pays(requests):
            if not self._on:
                self._began()
            return requests
        if self._on:
            self._stopped(requests)
        return few if self._probes(requests, few) else 0

    def _grow(self, *, young: bool) -> None:
        """Of requests that are all new now, or grown since they were, others of that age say what to expect. Not while
        grown ones are drafted for: their own drafts say it."""
        if young == self._young:
            return
        self._young = young
        if young:
            self._unprobed, self._began_at = True, self._rounds
        if young or not self._on:
            self._expect_others()

    def _finds_out(self) -> bool:
        """Whether too little is known: of any drafts, or of those of grown requests where young ones do not pay."""
        if self._count < ENOUGH:
            return True
        return not self._on and not self._young and self._memory.count(young=False) < ENOUGH

    def _probes(self, requests: int, few: int) -> bool:
        """Whether to find out now, as far as the share goes: after a while, or where requests that were all new have
        grown and may be worth it."""
        due = PROBE_SHARE * (self._clock - self._probed)
        if due < self._probe_seconds:
            return False
        seconds = max(self._probe_seconds, self.costs.drafting(few))
        rarer: int = 2 ** min(self._in_vain, MOST_HALVINGS)
        if self._idle_steps >= rarer * self._settings.probe_steps and due >= rarer * seconds:
            self._in_vain += 1
        elif self._young or not self._unprobed or due < seconds or not self._may_pay(requests):
            return False
        self._idle_steps, self._probed = 0, self._clock
        return True

    def _may_pay(self, requests: int) -> bool:
        """Not so if what is remembered of grown requests, be it little, says that drafting is far from that."""
        return self._count == 0 or self._promise(requests) >= HOPELESS

    def _promise(self, requests: int) -> float:
        """The ratio of tokens a second that what is remembered of grown requests promises so many."""
        asked = (requests, self._count)
        if self._promised is None or self._promised[0] != asked:
            self._promised = asked, self._gain(self._memory.of(young=False), requests)
        return self._promised[1]

    def _gain(self, seen: Iterable[Array], requests: int) -> float:
        """The ratio of tokens a second, were all drafts like these."""
        verifying = partial(self.costs.verifying, requests)
        return gain(np.stack(list(seen)), requests, verifying, self.costs.drafting(requests))

    def allocate(self, survival: Array, caps: Array, total: int) -> Array:
        return allocate(survival, caps, total)

    def observe(self, cost: VerifyCost) -> None:
        self.costs.observe(cost)
        self._clock += cost.target_seconds + cost.draft_seconds
        if cost.steps > 1:
            self._clock += (cost.steps - 1) * float(self.costs(np.array([cost.requests]))[0])
        self._idle_steps += cost.steps
        verifying = 0.0
        if cost.decode and cost.rows > cost.requests:
            alone, whole = self.costs.verifying(cost.requests, np.array([cost.requests, cost.rows]))
            verifying = cost.target_seconds * (1 - float(alone / whole))
        if self._on:
            self._spent_on += cost.draft_seconds + verifying
        elif cost.drafted:
            self._probe_seconds = cost.draft_seconds
        else:
            self._probe_seconds += verifying
        if cost.chances is not None:
            self._learned = cost.learned
        if cost.chances is not None and len(cost.chances):
            self._learn(cost.chances)

    def _began(self) -> None:
        self._on, self._by_probe, self._learned_on, self._spent_on = True, self._others == 0, 0, 0.0

    def _stopped(self, requests: int) -> None:
        """A last request or two may be drafted for at the end of every batch: that makes probes no more promising."""
        if self._learned_on >= max(REMEMBERED, SHORT * requests):
            self._in_vain = 0
        elif self._by_probe:
            self._probe_seconds += self._spent_on
        self._on = False
        self._idle_steps, self._probed = 0, self._clock
        self._shorten(KEPT_WHEN_STOPPED)

    def _shorten(self, most: int) -> None:
        for _ in range(len(self._seen) - most):
            self._seen.popleft()
            self._others = max(0, self._others - 1)

    def _expect_others(self) -> None:
        """Forget what was said before; a few drafts of other requests of this age stand for these."""
        self._asked = None
        self._seen = deque(self._memory.typical(KEPT_WHEN_STOPPED, young=self._young))
        self._others = len(self._seen)

    def _learn(self, chances: Array) -> None:
        """``[R, n]`` survival of new drafts."""
        made = list(usable(chances, np.full(len(chances), chances.shape[1])))
        self._memory.add(made, young=self._young)
        self._unprobed &= self._young
        self._seen.extend(made)
        if len(self._seen) - self._others >= (ENOUGH if self._on else PROBED):
            for _ in range(self._others):
                self._seen.popleft()
            self._others = 0
        most = max(REMEMBERED if self._on else KEPT_WHEN_STOPPED, len(chances))
        self._shorten(most)
        self._count += len(chances)
        self._rounds += 1
        self._learned_on += len(chances)

    def _pays(self, requests: int) -> bool:
        """Whether drafting is expected to."""
        asked = (requests, self._count // ASKED_EACH if self._on else self._count)
        if self._asked != asked:
            self._asked = asked
            seen, least = list(self._seen), 1.0
            if not self._young and self._memory.count(young=False) < LITTLE:
                least = HOPELESS
            elif self._on and self._begins(requests):
                least = CLEARLY
                seen += self._memory.typical(ENOUGH, young=self._young)
            self._answer = self._gain(seen, requests) > least
        return self._answer

    def _begins(self, requests: int) -> bool:
        """Whether the text is young, and nothing says that what follows will not pay."""
        young = self._rounds - self._began_at < YOUNG
        return young and (self._rounds < YOUNG or self._promise(requests) >= 1.0)
