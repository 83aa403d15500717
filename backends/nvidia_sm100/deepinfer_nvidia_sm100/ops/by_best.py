"""What stages make of a row that they compare with its best logit: ``temperature`` and ``min_p``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def changes(value, GREEDY: tl.constexpr, MIN_P: tl.constexpr):
    """Whether a row with this parameter changes at all."""
    if MIN_P:
        return value > 0.0
    else:
        return (value >= GREEDY) & (value != 1.0)


@triton.jit
def put(place, inside, logit, peak, value, MIN_P: tl.constexpr):
    """Writes what logits become in a row with this best one. What is written does not stay in the cache, which has
    better use for its room."""
    score = logit - tl.where(peak == float("-inf"), 0.0, peak)  # a row without a token stays one
    if MIN_P:
        floor = tl.log(value.to(tl.float64)).to(tl.float32)
        tl.store(place, float("-inf"), mask=inside & (score < floor))
    else:
        tl.store(place, tl.div_rn(score, value), mask=inside, cache_modifier=".cs")
