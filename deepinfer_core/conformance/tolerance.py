"""How far a right operator may be from the float64 reference: from dtype and reduction length, nothing by hand.

A result is held to ``|found - expected| <= bound``, element by element, with ``expected`` from the reference operators
run in float64 on the very same inputs. The parts of a bound:

* ``u`` is the unit roundoff of a dtype, half the distance from 1 to the next number: 2^-24 for float32, 2^-11 for
  float16, 2^-8 for bfloat16. A correctly rounded result is within ``u |y|``, plus the spacing of subnormals, which
  devices may flush to zero.
* A sum of K products accumulated in float32, in whatever order, is within ``gamma(K) * sum |a_i b_i|``. The sum of the
  magnitudes, which is computed and not guessed, makes the bound follow cancellation. ``gamma`` is the smaller of the
  worst case, ``K u / (1 - K u)``, and of the probabilistic bound of Higham and Mary (2019, SIAM J. Sci. Comput. 41),
  ``exp(lambda sqrt(K) u + K u^2 / (1 - u)) - 1``; with lambda = 8 it fails a right sum with a probability below
  2 exp(-lambda^2 / 2), about 1e-14, per result.
* Elementary functions (exp, sigmoid, rsqrt) may be off by ``FUNCTION`` units of float32.
"""

from __future__ import annotations

import math

import torch

LAMBDA = 8.0
FUNCTION = 8.0
U32 = 2.0**-24


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def gamma(length: int) -> float:
    """Relative error of a float32 sum of ``length`` terms, against the sum of their magnitudes."""
    if length < 1:
        return 0.0
    probable = math.expm1(LAMBDA * math.sqrt(length) * U32 + length * U32**2 / (1 - U32))
    return min(probable, length * U32 / (1 - length * U32))


def rounding(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bound of storing ``expected`` (float64) in ``dtype``: one rounding, or a flush to zero."""
    info = torch.finfo(dtype)
    # float16's subnormals are part of its useful range; wider exponents may flush theirs.
    floor = info.smallest_normal * info.eps if dtype == torch.float16 else info.smallest_normal
    return torch.nan_to_num(expected.abs(), nan=0.0, posinf=0.0) * unit_roundoff(dtype) + floor
