"""SamplingParams: what is accepted, what is refused, before anything is queued."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from deepinfer_core import SamplingParams
from deepinfer_core.api import ConstraintSpec, InvalidRequestError

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", v) for v in (-0.1, NAN, INF, -INF, "1", None, True, 10**400, [1.0])],
    *[("top_p", v) for v in (0.0, -0.1, 1.0001, NAN, INF, "0.5", None, False)],
    *[("min_p", v) for v in (-0.01, 1.01, NAN, None, "0")],
    *[("top_k", v) for v in (-2, 1.0, 1.5, NAN, "4", None, True)],
    *[("n", v) for v in (0, -1, 1.0, 2**63, "2", None, True, NAN, int)],
    *[("max_tokens", v) for v in (0, -1, 1.0, INF, "16", True, 2**31)],
    *[("min_tokens", v) for v in (-1, 17, 0.0, None, "0", False)],
    *[("seed", v) for v in (1.0, "7", NAN, True, [1])],
    *[(name, v) for name in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, NAN, INF, None, "0")],
    *[("repetition_penalty", v) for v in (0.0, -1.0, 1e-7, 1e7, NAN, INF, None, "1")],
    *[("stop", v) for v in ("", ["a", ""], 5, [5], {"a": 1}, b"a")],
    *[("stop_token_ids", v) for v in ([-1], [1.0], "12", 5, [True], [2**31], {1})],
    *[
        ("logit_bias", v)
        for v in ({-1: 1.0}, {"x": 1.0}, {1: NAN}, {1: INF}, {1: "1"}, [1], {1.5: 1.0}, {"1": 1, 1: 2})
    ],
    *[("bad_words", v) for v in (["a", ""], [5], 5)],
    *[("allowed_token_ids", v) for v in ([], [-1], "12", [1.0], 5)],
    *[(name, v) for name in ("logprobs", "prompt_logprobs") for v in (-2, 1.5, "1", NAN)],
    *[("logprobs_mode", v) for v in ("both", None, 1)],
    *[(name, 1) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")],
    *[(name, None) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")],
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[f"{f}-{str(v)[:12]}" for f, v in REFUSED])
def test_refused_with_the_field_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: value})


ACCEPTED: list[tuple[str, Any, Any]] = [
    ("temperature", 0, 0.0),
    ("temperature", 9.99e-6, 0.0),
    ("temperature", 1e-45, 0.0),
    ("temperature", 1e-5, 1e-5),
    ("temperature", 2, 2.0),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", 1e10, 1e10),
    ("temperature", 1e300, float(np.finfo(np.float32).max)),
    ("repetition_penalty", np.float32(2), 2.0),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", np.int64(4), 4),
    ("min_tokens", 16, 16),
    ("max_tokens", None, None),
    ("seed", 2**64 + 3, 3),
    ("seed", -1, 2**64 - 1),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("stop", "a", ("a",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", (1, np.int32(2)), (1, 2)),
    ("logit_bias", {"7": 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
    ("allowed_token_ids", [3, 1], (3, 1)),
    ("logprobs", False, None),
    ("logprobs", True, 1),
    ("logprobs", 0, 0),
    ("logprobs", -1, -1),
    ("bad_words", ["a"], ("a",)),
]


@pytest.mark.parametrize(("field", "value", "stored"), ACCEPTED, ids=[f"{f}-{str(v)[:12]}" for f, v, _ in ACCEPTED])
def test_accepted(field: str, value: Any, stored: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == stored


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "logprobs"])
def test_too_large_a_count_is_told_the_largest(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}={2**31}: expected .*, at most {2**31 - 1}$"):
        SamplingParams(**{field: 2**31})
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: -7})
    assert "at most" not in str(caught.value)


def test_seq_seed_is_an_alias() -> None:
    assert SamplingParams(seq_seed=7) == SamplingParams(seed=7)


def test_seed_and_another_seq_seed_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="seq_seed"):
        SamplingParams(seed=7, seq_seed=8)


def test_numpy_booleans_are_no_counts() -> None:
    with pytest.raises(InvalidRequestError, match="n="):
        SamplingParams(n=np.True_)  # type: ignore[arg-type]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_parameters_are_fixed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


ODD: list[Any] = [
    *(None, True, 0, 1, -1, 2**31, 2**70, -(2**70), 10**400, 0.0, -0.0, 0.5, 1e300, 1e-300, NAN, INF, -INF, 1j),
    *(
        "",
        "x",
        "\ud800",
        b"",
        b"x",
        bytearray(b"x"),
        int,
        object(),
        (),
        (1,),
        (1, 2),
        ((1, 2),),
        ((1, 2, 3),),
        ((1, 1),) * 2,
    ),
    *([], [1], [[1]], [None], [NAN], ["x", 1], {}, {1: 1}, {"x": 1}, {"x": "y"}, {None: 1}, {(): ()}, set(), {1}),
    *(
        range(3),
        iter([1]),
        np.array([1]),
        np.array([1.0, 2.0]),
        np.array("x"),
        np.bool_(True),
        np.int8(3),
        np.float16(2),
    ),
]
FIELDS = sorted(set(inspect.signature(SamplingParams).parameters))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ODD, ids=[f"{i}-{type(v).__name__}" for i, v in enumerate(ODD)])
def test_whatever_is_given_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    """No other exception, and nothing that a later stage would stumble over: what is taken is plain and hashable."""
    refused, params = None, None
    try:
        params = SamplingParams(**{field: value})
    except InvalidRequestError as error:
        refused = str(error)
    if params is None:
        assert field.removeprefix("seq_") in str(refused)
    else:
        assert type(getattr(params, "seed" if field == "seq_seed" else field, None)) in PLAIN
        hash(params)


PLAIN = (type(None), bool, int, float, str, tuple, ConstraintSpec)
