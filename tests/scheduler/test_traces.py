"""Trace files of every layout, and generated loads."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepinfer_scheduler.traces.blocks import engine_blocks
from deepinfer_scheduler.traces.files import open_trace
from deepinfer_scheduler.traces.synthetic import KINDS, Load, synthetic
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import ConfigError
from deepinfer_core.api.simulation import SimulatedRequest, SimulationConfig

CONFIG = SimulationConfig(block_size=16)


def read(path: Path, text: str, config: SimulationConfig = CONFIG, **options: Any) -> list[SimulatedRequest]:
    path.write_text(text, encoding="utf-8")
    source = open_trace(path, **options)
    first, again = (list(source.requests(config)) for _ in range(2))
    assert first == again
    return first


def columns(requests: list[SimulatedRequest], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(request, name) for name in names) for request in requests]


MOONCAKE = """{"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 1500, "input_length": 70, "output_length": 6, "hash_ids": [7, 9, 10], "tenant": "x", "priority": 2}
{"timestamp": 1500, "input_length": 3, "output_length": 1, "ttft_target_ms": 250, "deadline_ms": 1000}
"""


def test_mooncake(tmp_path: Path) -> None:
    found = read(tmp_path / "m.jsonl", MOONCAKE, id_tokens=32)
    assert columns(found, "arrival", "prompt", "outputs") == [(0, 40, (5,)), (1.5, 70, (6,)), (1.5, 3, (1,))]
    assert columns(found, "blocks") == [((14, 15),), ((14, 15, 18, 19),), ((),)]
    assert columns(found, "tenant", "priority") == [("", 0), ("x", 2), ("", 0)]
    assert (found[2].ttft_target, found[2].tpot_target, found[2].deadline) == (0.25, None, 2.5)


def test_azure(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04.0319600,396,109\n2023-11-16 18:17:05,1,2\n"
    )
    found = read(tmp_path / "a.csv", text)
    assert columns(found, "prompt", "outputs") == [(374, (44,)), (396, (109,)), (1, (2,))]
    assert [request.arrival for request in found] == pytest.approx([0, 0.052, 1.02004])


def test_azure_with_a_time_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.0099300+00:00,5,6\n2024-05-10 00:00:01Z,7,8"
    found = read(tmp_path / "a.csv", text)
    assert [request.arrival for request in found] == pytest.approx([0, 0.99007])


def test_burstgpt_leaves_out_failures(tmp_path: Path) -> None:
    text = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118.5,GPT-4,417,276,693,API log\n"
    )
    found = read(tmp_path / "b.csv", text)
    assert columns(found, "arrival", "prompt", "outputs", "tenant") == [
        (5, 472, (18,), "ChatGPT"),
        (118.5, 417, (276,), "GPT-4"),
    ]


LINE = {"timestamp": 0, "input_length": 40, "output_length": 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "starts with ''"),
        ("a,b,c\n1,2,3\n", "expected a recorded trace"),
        ("{}\n", "expected a recorded trace"),
        (json.dumps({**LINE, "input_length": 0}), r":1: input_length=0: expected a whole number >= 1"),
        (json.dumps({**LINE, "input_length": 1.5}), r":1: input_length=1.5"),
        (json.dumps({**LINE, "output_length": "x"}), r":1: output_length='x': expected a number"),
        (json.dumps(LINE) + "\n" + json.dumps({"input_length": 3}), r":2: timestamp=None"),
        (json.dumps(LINE) + "\nnot json\n", r":2: expected a JSON object"),
        (json.dumps({**LINE, "hash_ids": [1, -1]}), r":1: hash_ids=\[1, -1\]: expected a list of whole numbers"),
        (json.dumps({**LINE, "timestamp": 9}) + "\n" + json.dumps(LINE), r":2: arrives 0.009 s before the line above"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", r":2: TIMESTAMP='yesterday'"),
        ("Timestamp,Request tokens,Response tokens\n1,-4,2\n", r":2: Request tokens='-4'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "t", text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_trace(tmp_path / "none")


def test_block_sizes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--block-size 24: .* expected a divisor or a multiple"):
        read(tmp_path / "m.jsonl", MOONCAKE, SimulationConfig(block_size=24), id_tokens=32)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 6)), min_size=2, max_size=5),
    id_tokens=st.sampled_from([4, 8, 16]),
    block_size=st.sampled_from([4, 8, 16]),
)
def test_blocks_are_shared_as_far_as_the_ids_say(
    lengths: list[tuple[int, int]], id_tokens: int, block_size: int
) -> None:
    """Prompts that agree on a number of ids agree on the blocks within them, and on no other."""
    prompts = []
    for number, (prompt, common) in enumerate(lengths):
        count = -(-prompt // id_tokens)
        own = range(100 * (number + 1), 100 * (number + 1) + count)
        prompts.append((prompt, [*range(min(common, count)), *own][:count]))
    found = [engine_blocks(ids, prompt, id_tokens, block_size) for prompt, ids in prompts]
    for prompt, blocks in zip((p for p, _ in prompts), found, strict=True):
        assert len(blocks) == prompt // block_size or id_tokens < block_size
    for (i, (_, a)), (j, (_, b)) in itertools.combinations(enumerate(prompts), 2):
        agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        equal = sum(x == y for x, y in zip(found[i], found[j], strict=False))
        assert equal == min(agreed * id_tokens // block_size, len(found[i]), len(found[j]))


# ---- generated


@pytest.mark.parametrize("kind", KINDS)
def test_generated_loads_are_repeatable_ascending_and_as_many_as_asked(kind: str) -> None:
    first, again, other = (
        list(synthetic(kind, Load(requests=400, rate=3, seed=seed)).requests(CONFIG)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len(first) == 400
    arrivals = [request.arrival for request in first]
    assert arrivals == sorted(arrivals)
    assert all(request.prompt >= 1 and min(request.outputs) >= 1 for request in first)


@pytest.mark.parametrize(("kind", "within"), [("chat", 0.06), ("bursty", 0.35), ("flood", 0.06), ("mixed", 0.2)])
def test_requests_come_at_their_rate(kind: str, within: float) -> None:
    found = list(synthetic(kind, Load(requests=6000, rate=3)).requests(CONFIG))
    assert found[-1].arrival == pytest.approx(6000 / 3, rel=within)


def test_poisson_gaps_have_the_deviation_of_their_mean() -> None:
    gaps = np.diff([r.arrival for r in synthetic("chat", Load(requests=8000, rate=3)).requests(CONFIG)])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    bursts = np.diff([r.arrival for r in synthetic("bursty", Load(requests=8000, rate=3)).requests(CONFIG)])
    assert bursts.std() > 1.5 * bursts.mean()


def test_agents_have_long_contexts_that_they_had_before() -> None:
    requests = list(synthetic("agents", Load(requests=6000, rate=2)).requests(SimulationConfig(block_size=64)))
    assert np.mean([request.prompt for request in requests[2000:]]) == pytest.approx(77_000, rel=0.05)
    seen: set[int] = set()
    total = reused = 0
    for number, request in enumerate(requests):
        inside = request.blocks[: request.prompt // 64]
        if number >= 2000:
            total += request.prompt
            reused += 64 * sum(block in seen for block in inside)
        seen.update(request.blocks)
    assert reused / total == pytest.approx(0.96, abs=0.01)


def test_a_flood_is_nine_of_ten() -> None:
    tenants = Counter(r.tenant for r in synthetic("flood", Load(requests=1000, rate=3)).requests(CONFIG))
    assert tenants["flood"] == 900
    assert len(tenants) == 5


def test_mixed_has_both_kinds() -> None:
    found = list(synthetic("mixed", Load(requests=3000, rate=3)).requests(CONFIG))
    kinds = Counter(request.tenant for request in found)
    assert kinds["batch"] / 3000 == pytest.approx(1 / 8, abs=0.05)
    assert all((r.tpot_target == 0.1) is (r.tenant == "interactive") for r in found)
