"""Fair shares by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024)."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_core.api import SchedulingEvent, SystemView

from .plain import Plain


class Fair(Plain):
    """The tenant that was served least comes next, its oldest request first.

    A counter per tenant adds up prompt tokens when a request is admitted, cached or not, and output tokens as they
    come. A tenant that was away starts again from the least counter of those that were not: it gains no credit.
    """

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._charged: dict[str, float] = defaultdict(float)
        self._live: Counter[str] = Counter()
        self._output: dict[str, float] = {}

    def on_event(self, event: SchedulingEvent) -> None:
        tenant = event.tenant
        if event.kind == "queued":
            if not self._live[tenant]:
                self._lift(tenant)
            self._live[tenant] += 1
        elif event.kind == "admitted":
            self._charged[tenant] += self.settings.fair_prompt_weight * event.tokens
        elif event.kind in ("finished", "aborted"):
            self._charged[tenant] += self.settings.fair_output_weight * event.tokens
            self._live[tenant] -= 1
            if not self._live[tenant]:
                del self._live[tenant]
                self._output.pop(tenant, None)

    def order(self, view: SystemView, k: int) -> Sequence[int]:
        waiting = view.waiting
        if not len(waiting.ids) or k <= 0:
            return []
        service = self._service(view)
        by_tenant = np.argsort(_compact(waiting.tenant), kind="stable")
        tenants = waiting.tenant[by_tenant]
        starts = np.flatnonzero(np.diff(tenants, prepend=-1))
        ends = np.append(starts[1:], len(tenants))
        queues = [(service[int(tenants[s])], int(s), int(e)) for s, e in zip(starts, ends, strict=True)]
        heapq.heapify(queues)
        chosen: list[int] = []
        while queues and len(chosen) < k:
            served, at, end = queues[0]
            index = int(by_tenant[at])
            chosen.append(index)
            served += self.settings.fair_prompt_weight * float(waiting.prompt[index])
            if at + 1 < end:
                heapq.heapreplace(queues, (served, at + 1, end))
            else:
                heapq.heappop(queues)
        return chosen

    def victims(self, view: SystemView, need_blocks: int) -> Sequence[int]:
        """Of the tenant that was served most first, of it the newest."""
        served = np.array(self._service(view))[view.running.tenant]
        order = np.argsort(served, kind="stable")[::-1]
        return [int(i) for i in order]

    def _service(self, view: SystemView) -> list[float]:
        """Weighted tokens of each tenant in ``view.tenants``, those of unfinished answers included."""
        output = np.zeros(len(view.tenants))
        for requests in (view.running, view.waiting):
            output += np.bincount(requests.tenant, requests.output, minlength=len(output))
        output *= self.settings.fair_output_weight
        self._output = {tenant: output[i] for i, tenant in enumerate(view.tenants) if output[i]}
        return [self._charged[tenant] + output[i] for i, tenant in enumerate(view.tenants)]

    def _lift(self, tenant: str) -> None:
        others = [self._charged[name] + self._output.get(name, 0.0) for name in self._live if name != tenant]
        if others:
            self._charged[tenant] = max(self._charged[tenant], min(others))


def _compact(tenant: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Small integers are sorted by radix, in linear time."""
    return tenant.astype(np.int16) if tenant.max() < 2**15 else tenant
