"""Two processes on the late device, which meet by its own means: a missing wait would send what is not there yet."""

from __future__ import annotations

from deepinfer_core.conformance.kit import ask, select
from deepinfer_core.conformance.target import open_target

CASES = {case.id: case for case in select("full", ["moe_communication"], "float32")}
NAMES = ("round_trip", "idle_rank", "experts_moved", "next_step")


def test_rows_come_back() -> None:
    target = open_target("fake")
    results = [ask(CASES[f"moe_communication[2]/float32/{name}"], target) for name in NAMES]
    target.close()
    assert [(r.outcome, r.message) for r in results] == [("passed", "reference:all_to_all")] * len(NAMES)
