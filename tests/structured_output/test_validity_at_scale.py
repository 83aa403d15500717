"""Thousands of texts of the models that come with the project; the committed counts, and how to get them again."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from keyword_suite import PAGE
from validity_at_scale import MODELS, SHARDS, all_jobs, page_section, read_summary, run, with_section

from deepinfer_core.api import ConstraintSpec


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("model", MODELS)
def test_every_finished_text_is_valid(model: str, shard: int) -> None:
    """Minutes for each shard: random texts end when they end."""
    if find_spec(MODELS[model]) is None:
        pytest.skip(f"{MODELS[model]} is not installed; it brings the model")
    counts = run(model, shard)
    print(model, shard, {kind: dict(one) for kind, one in counts.items()})
    assert all(one["valid"] == one["stop"] for one in counts.values())
    assert counts["json"]["stop"] > 2 * counts["json"]["length"], counts


def test_the_committed_counts_are_of_all_jobs_and_on_the_page() -> None:
    summary = read_summary()
    assert summary.keys() == MODELS.keys()
    jobs = all_jobs()
    for shards in summary.values():
        counts = [one for kinds in shards.values() for one in kinds.values()]
        assert sum(one.get("stop", 0) + one.get("length", 0) for one in counts) == len(jobs)
        assert all(one.get("valid", 0) == one.get("stop", 0) for one in counts)
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_section(page, page_section(summary))


def test_there_are_enough_grammars() -> None:
    different: dict[str, set[ConstraintSpec | None]] = {"json": set(), "regex": set(), "ebnf": set()}
    for job in all_jobs():
        different[job.kind].add(job.params.structured_outputs)
    assert len(different["json"]) >= 300
    assert len(different["regex"]) >= 100
    assert len(different["ebnf"]) >= 20
