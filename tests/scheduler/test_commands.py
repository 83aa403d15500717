"""``deepinfer simulate``, ``profile-steps`` and ``idle-report``, run as a user would."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_scheduler.commands import profile_steps as profile_command
from deepinfer_scheduler.commands.bar import Bar
from deepinfer_scheduler.cost_table import read_table
from deepinfer_scheduler.figures import Collector, Targets
from deepinfer_scheduler.plot import pareto
from hypothesis import given
from hypothesis import strategies as st
from toys.checkpoints import toy_settings, write_toy

from deepinfer_core.api.simulation import SimulatedRequest, SimulatedResult, SimulationTotals, profile_steps
from deepinfer_core.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


SMALL = ("--synthetic", "chat", "--requests", "60", "--rate", "0.5")


def test_policies_side_by_side(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(
        "simulate", "--policy", "fcfs,latency", *SMALL, "--load", "0.5,2", "--json", "--plot", str(tmp_path / "p.png")
    )
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert [(r["policy"], r["load"]) for r in report["runs"]] == [
        ("fcfs", 0.5), ("fcfs", 2), ("latency", 0.5), ("latency", 2),
    ]  # fmt: skip
    for row in report["runs"]:
        assert (row["requests"], row["refused"], row["policy_failures"]) == (60, 0, 0)
        assert row["tpot_ms"]["p99"] >= row["tpot_ms"]["p50"] > 0
        assert row["ttft_ms"]["mean"] > row["queue_ms"]["mean"] >= 0
        assert 0 < row["utilisation"] <= 1
        assert 0 < row["goodput_share"] <= 1
    tokens = {row["steps"] and row["output_tokens_per_second"] * row["seconds"] for row in report["runs"]}
    assert max(tokens) == pytest.approx(min(tokens))
    assert (tmp_path / "p.png").stat().st_size > 10_000
    for word in ("fcfs", "latency", "TTFT", "times: mean / p50 / p99"):
        assert word in out


def test_replicas_share_the_load(run: Run) -> None:
    def waits(*more: str) -> Any:
        return json.loads(run("simulate", *SMALL, "--load", "4", "--json", *more)[1].splitlines()[-1])["runs"][0]

    one, two, turns = waits(), waits("--replicas", "2"), waits("--replicas", "2", "--router", "round_robin")
    assert two["ttft_ms"]["mean"] < one["ttft_ms"]["mean"]
    assert turns["requests"] == two["requests"] == 60
    assert turns["ttft_ms"] != two["ttft_ms"]


def test_a_trace_and_settings(run: Run, tmp_path: Path) -> None:
    lines = [{"timestamp": 100 * i, "input_length": 600, "output_length": 4, "hash_ids": [0, i]} for i in range(8)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = (
        "simulate",
        "--trace",
        str(tmp_path / "m.jsonl"),
        "--policy",
        "shortest_first",
        "--json",
        "--requests",
        "5",
    )
    code, out, _ = run(*arguments, "--set", "plugins.scheduler.patience_s=2", "--max-running", "1")
    (row,) = json.loads(out.splitlines()[-1])["runs"]
    assert (code, row["requests"]) == (0, 5)
    assert row["cache_hit_rate"] == pytest.approx(4 * 512 / (5 * 600))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --trace FILE or --synthetic KIND, one of them"),
        ((*SMALL, "--trace", "x"), "one of them"),
        ((*SMALL, "--policy", "fairest"), "no loaded plugin has policy 'fairest'"),
        ((*SMALL, "--policy", "fair", "--set", "plugins.scheduler.patience"), "expected KEY=VALUE"),
        ((*SMALL, "--policy", "fair", "--set", "plugins.scheduler.patience_s=no"), "patience_s = 'no'"),
        ((*SMALL, "--policy", "fair", "--set", "plugins.scheduler.patience_s=-1"), "scheduler.patience_s = -1 (from"),
        ((*SMALL, "--load", "0"), "expected numbers above 0"),
        ((*SMALL, "--plot", "x.gif"), "expected a file ending in .png"),
        ((*SMALL, "--plot", "/no/such/x.png"), "--plot /no/such/x.png: its folder does not exist"),
        ((*SMALL, "--json", "/no/such/x"), "--json /no/such/x: its folder does not exist"),
        (("--synthetic", "chat", "--rate", "nan"), "--rate nan: expected a number above 0"),
        (("--synthetic", "chat", "--rate", "0"), "--rate 0: expected a number above 0"),
        ((*SMALL, "--ttft-target-ms", "nan"), "--ttft-target-ms nan: expected a number above 0"),
        ((*SMALL, "--policy", "json:loads"), "--policy json:loads: the JSON object must be"),
        ((*SMALL, "--policy", "collections:Counter"), "it makes a Counter, which has no admit, order,"),
        ((*SMALL, "--cost-table", "none.json"), "cost table none.json: No such file"),
        (("--trace", "none.jsonl"), "trace none.jsonl: No such file"),
    ],
)
def test_wrong_use_is_one_line(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("simulate", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_profile_steps_writes_a_table_that_simulate_takes(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    write_toy(tmp_path / "toy", "PrefixHash")
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", ",".join(toy_settings()["plugins.paths"]))
    monkeypatch.setenv("DEEPINFER_KV_CACHE__BLOCK_SIZE", "4")
    table = tmp_path / "costs.json"
    code, out, err = run(
        "profile-steps", "--model", str(tmp_path / "toy"), "--out", str(table), "--max-batch-tokens", "32",
        "--max-running", "4", "--num-blocks", "257", "--rounds", "1",
    )  # fmt: skip
    assert code == 0, err
    assert "left out as disturbed" in out
    found = read_table(table)
    assert found.facts["model"] == "ToyPrefixHash"
    assert (found.facts["max_batch_tokens"], found.facts["max_running"]) == (32, 4)
    assert found.rows[:, 0].tolist() == [1, 2, 4, 8, 16, 32]
    assert found.rows[0, 1] > 0
    assert found.facts["points_left_out"] == 0
    assert "100% round 1 of 1" in err
    assert run("simulate", *SMALL, "--cost-table", str(table))[0] == 0


def test_a_profile_says_what_it_left_out(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    write_toy(tmp_path / "toy", "PrefixHash")
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", ",".join(toy_settings()["plugins.paths"]))
    asked: dict[str, Any] = {}

    def measure(settings: Any, **given: Any) -> Any:
        asked.update(given, settings=settings)
        return profile_steps(settings, **given | {"seconds": 1e-9})

    monkeypatch.setattr(profile_command, "measure", measure)
    arguments = ("profile-steps", "--model", str(tmp_path / "toy"), "--out", str(tmp_path / "costs.json"), "--quick")
    code, out, err = run(*arguments)
    assert code == 0, err
    assert (asked["rounds"], asked["seconds"]) == (1, 10)
    assert "8 of " in out
    assert "what is larger is extrapolated. All of them: --seconds 0" in out
    assert read_table(tmp_path / "costs.json").facts["max_running"] == 256
    run(*arguments, "--rounds", "2", "--seconds", "0")
    assert (asked["rounds"], asked["seconds"]) == (2, None)


def test_a_profile_that_fails_leaves_no_file(run: Run, tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for out in (new, old):
        assert run("profile-steps", "--model", str(tmp_path / "none"), "--out", str(out))[0] == 2
    assert not new.exists()
    assert old.read_text() == "kept"
    assert "--out" in run("profile-steps", "--model", "demo", "--out", str(tmp_path / "no" / "x.json"))[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_a_long_command_is(terminal: bool) -> None:
    to = StringIO()
    to.isatty = lambda: terminal  # type: ignore[method-assign]
    with Bar(to) as bar:
        for number in range(101):
            bar.show(f"point {number}")
            bar.advance(number / 100)
    text = to.getvalue()
    if terminal:
        last = text.split("\r")[-1]
        assert last.startswith("[########################] 100% point 100 ")
        assert last.endswith("\n")
        assert "\r[############------------]  50% point 50 " in text
        assert text.count("\n") == 1
    else:
        assert 9 <= text.count("\n") <= 10
        assert " 50% point 50\n" in text


def test_idle_report(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    write_toy(tmp_path / "toy", "PrefixHash", max_len=512)
    monkeypatch.setenv("DEEPINFER_PLUGINS__PATHS", ",".join(toy_settings()["plugins.paths"]))
    timeline = str(tmp_path / "run.json")
    code, _, err = run("bench", "--model", str(tmp_path / "toy"), "--quick", "--timeline", timeline)
    assert code == 0, err
    code, out, _ = run("idle-report", timeline)
    assert code == 0
    assert "the device was idle for" in out
    assert "request bench-" in out
    report = json.loads(run("idle-report", timeline, "--json")[1])
    assert report["busy"] + sum(report["idle"].values()) == pytest.approx(report["total"])
    assert len(report["waiting"]) == 8
    assert run("idle-report", timeline, "--request", "bench-3")[1].count("request bench-") == 1
    code, _, err = run("idle-report", timeline, "--request", "nobody")
    assert code != 0
    assert "there is no such request" in err


# ---- figures


def result(number: int, arrival: float, first: float, end: float, output: int, **more: Any) -> SimulatedResult:
    request = SimulatedRequest(id=str(number), arrival=arrival, prompt=10, outputs=(output,), **more)
    return SimulatedResult(
        request=request, first_scheduled=arrival + 0.5, first_token=first, finished=end, output=output,
        longest_output=output, cached=0, preemptions=0,
    )  # fmt: skip


def test_figures_are_what_they_say() -> None:
    collector = Collector(Targets(ttft=2, tpot=1))
    collector.add(result(1, 0, 1, 9, 9, tenant="a"))
    collector.add(result(2, 2, 5, 6, 3, tenant="b"))
    collector.add(result(3, 2, 3, 3, 1, tenant="b", deadline=2.5))
    collector.add(result(4, 2, 5, 10, 3, tenant="b", ttft_target=3, tpot_target=2.5))
    totals = SimulationTotals(steps=7, busy=5, output_tokens=16, queried=40, cached=10, preemptions=2)
    found = collector.figures(totals, replicas=2)
    assert found["seconds"] == 10
    assert found["ttft_ms"] == pytest.approx({"mean": 2000, "p50": 2000, "p99": 3000})
    assert found["tpot_ms"]["mean"] == pytest.approx(np.mean([1000, 500, 2500]))
    assert found["queue_ms"]["p99"] == pytest.approx(500)
    assert found["output_tokens_per_second"] == 1.6
    assert found["goodput_share"] == 0.5  # the first and the last
    assert (found["cache_hit_rate"], found["utilisation"]) == (0.25, 0.25)
    speeds = np.array([9 / 9, 7 / 13])
    assert found["fairness"] == pytest.approx(speeds.sum() ** 2 / (2 * (speeds**2).sum()))
    assert found["tokens_per_second_per_user"] == pytest.approx(1e3 / found["tpot_ms"]["mean"])


def test_nothing_has_no_figures() -> None:
    found = Collector(Targets()).figures(SimulationTotals(), replicas=1)
    assert found["ttft_ms"] is found["fairness"] is found["output_tokens_per_second"] is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    found = pareto(points)
    best = {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
    assert {points[i] for i in found} == best
    assert len(found) == len(best)
    assert [points[i][0] for i in found] == sorted(points[i][0] for i in found)
