"""The kit bites: every mistake fails the case that was written for it, and says what it found."""

from __future__ import annotations

import attrs
import broken_between  # noqa: F401  registers its mutants
import broken_dense  # noqa: F401
import broken_sequence  # noqa: F401
import pytest
from broken import MUTANTS, broken_target

from deepinfer_core.api import no, yes
from deepinfer_core.conformance import Gap
from deepinfer_core.conformance.kit import all_cases, ask, run_on
from deepinfer_core.conformance.target import open_target

CASES = {case.id: case for case in all_cases("float32")}


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 25


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_mistake_fails_its_case(name: str) -> None:
    mutant = MUTANTS[name]
    with broken_target(mutant) as target:
        result = ask(CASES[mutant.case], target)
    assert result.outcome == "failed", result
    assert mutant.says in result.message
    assert mutant.op in result.message
    assert "expected" in result.message or " raised " in result.message or "must not refuse" in result.message


@pytest.mark.parametrize("case", sorted({m.case for m in MUTANTS.values()}))
def test_the_reference_passes_the_same_case(case: str) -> None:
    """A case that fails whatever it is asked proves nothing."""
    target = open_target("reference")
    try:
        result = ask(CASES[case], target)
    finally:
        target.close()
    assert result.outcome == "passed" or "does not claim" in result.message, result


ONLY_IN_FLOAT32 = {
    "products_of_11_bits",  # what bfloat16 has anyway
    "statistics_in_16_bits",  # another mistake there: the dtype of the result
    "last_group_dropped",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - ONLY_IN_FLOAT32))
def test_the_mistake_fails_its_case_in_16_bits_too(name: str) -> None:
    """Wider tolerances let no mistake through: they follow the dtype and what is summed, not the largest value."""
    mutant = MUTANTS[name]
    cases = {case.id: case for case in all_cases("bfloat16")}
    case = cases.get(mutant.case.replace("/float32/", "/bfloat16/")) or cases[mutant.case]
    with broken_target(mutant) as target:
        target.dtype = "bfloat16"
        result = ask(case, target)
    assert result.outcome == "failed", result
    assert mutant.says in result.message


def test_a_known_gap_does_not_fail_the_run() -> None:
    mutant = MUTANTS["bytes_of_one_layer_announced"]
    gap = Gap(case=mutant.case, reason="bytes are counted by layer", link="somewhere")
    with broken_target(mutant) as target:
        known = run_on(target, families=["kv_layout"], gaps=[gap])
        unknown = run_on(target, families=["kv_layout"])
    (result,) = known.results
    assert (result.outcome, known.passed) == ("known_gap", True)
    assert "bytes are counted by layer (somewhere)" in result.message
    assert "block_bytes" in result.message
    assert "bytes are counted by layer" in known.table()
    assert not unknown.passed


def test_a_refusal_outside_the_minimum_is_no_failure() -> None:
    """An odd width may be refused; the report says so, with the reason."""
    mutant = attrs.evolve(
        MUTANTS["refuses_too_much"],
        supports=lambda request: no("odd widths") if request.hidden % 2 else yes(9),
    )
    with broken_target(mutant) as target:
        result = ask(CASES["pointwise.rms_norm[odd_width]/float32/odd_rows"], target)
    assert result.outcome == "refused"
    assert "broken:mistaken: odd widths" in result.message
