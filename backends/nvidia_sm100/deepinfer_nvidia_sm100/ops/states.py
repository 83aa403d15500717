"""What is left to do for a row of a step: :mod:`.chain`'s kernels hand this on."""

from __future__ import annotations

import triton.language as tl

DONE, LISTED, BAND, RACED, OPEN = (tl.constexpr(n) for n in range(5))
"""Nothing; its list; a band of its logits; what is before the tokens that lead the race; all of it."""
