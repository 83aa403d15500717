"""Settings of the policies: ``plugins.scheduler.<policy>_<field>``."""

from __future__ import annotations

from typing import Any, Literal

import attrs


def _above(minimum: float, default: float) -> Any:
    return attrs.field(default=default, validator=attrs.validators.gt(minimum))


def _from(minimum: float, default: float) -> Any:
    return attrs.field(default=default, validator=attrs.validators.ge(minimum))


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """What users may tune.

    Attributes:
        patience_s: whoever has waited this long comes first, in order of arrival, so that nobody waits for ever.
            For ``deadline`` and ``latency`` it is the deadline of those that name none. ``priority`` and ``fair``
            have their own means.
        priority_ageing_s: waiting this long is worth one class of priority.
        deadline_refuse: refuse a request at its arrival when its deadline can no longer be met.
        fair_prompt_weight, fair_output_weight: what a token of prompt and of output counts for.
        shortest_first_prediction: how long an answer will be. ``history``: as its tenant's were, on average;
            ``limit``: as long as it may be.
        shortest_first_output_weight: prompt tokens that an output token counts for.
        latency_ttft_target_ms, latency_tpot_target_ms: of requests that name none.
        latency_margin: share of the time per output token that a step may be predicted to take.
        latency_min_chunk: prompt tokens below which a chunk is not worth a step, unless somebody's patience is over.
        throughput_reserve: share of the cache blocks that must be free for new prompts to be taken while others decode.
    """

    patience_s: float = _above(0, 30.0)
    priority_ageing_s: float = _above(0, 30.0)
    deadline_refuse: bool = False
    fair_prompt_weight: float = _from(0, 1.0)
    fair_output_weight: float = _above(0, 2.0)
    shortest_first_prediction: Literal["history", "limit"] = "history"
    shortest_first_output_weight: float = _from(0, 4.0)
    latency_ttft_target_ms: float = _above(0, 2000.0)
    latency_tpot_target_ms: float = _above(0, 50.0)
    latency_margin: float = attrs.field(default=0.9, validator=[attrs.validators.gt(0), attrs.validators.le(1)])
    latency_min_chunk: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    throughput_reserve: float = attrs.field(default=0.05, validator=[attrs.validators.ge(0), attrs.validators.lt(1)])
