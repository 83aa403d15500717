"""The core's operators that declare batch invariance: they move data, count, or go row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from deepinfer_batch_invariance.layouts import layout_of
from deepinfer_batch_invariance.self_check import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import CAP, MOST_ROWS, check_company, companies, normal, operator, providers
from sampling_company import STAGES, check_stage

from deepinfer_core.api import (
    AppendTokensRequest,
    EmbeddingRequest,
    InputIdsRequest,
    SamplingRequest,
    SlotMappingRequest,
    WriteKVRequest,
)

DEMANDS = frozenset({CAP})
Check = Callable[[str, int, int], None]
"""``(provider, rows, seed)``."""


def embedding(label: str, rows: int, seed: int) -> None:
    request = EmbeddingRequest(vocab_size=50, hidden=33, dtype="float32", weight_dtype="float32", demands=DEMANDS)
    op, ids = operator(request, label), torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(seed))
    weight = op.prepare(normal(50, 33))
    check_company(lambda picked: op.run(ids[picked], weight), rows, seed)


def input_ids(label: str, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(0, 1000, (7, 40), generator=generator, dtype=torch.int32)
    slots, positions = (torch.randint(0, high, (rows,), generator=generator) for high in (7, 40))
    op = operator(InputIdsRequest(demands=DEMANDS), label)
    check_company(lambda picked: op.run(history, slots[picked], positions[picked]), rows, seed)


def slot_mapping(label: str, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 99, (5, 4), generator=generator, dtype=torch.int32)
    owners, positions = (torch.randint(0, high, (rows,), generator=generator) for high in (5, 64))
    op = operator(SlotMappingRequest(block_size=16, demands=DEMANDS), label)
    check_company(lambda picked: op.run(table, owners[picked], positions[picked]), rows, seed)


def append_tokens(label: str, rows: int, seed: int) -> None:
    places = torch.randperm(rows * 4, generator=torch.Generator().manual_seed(seed))[:rows]
    op, tokens = operator(AppendTokensRequest(demands=DEMANDS), label), torch.arange(rows) + 1

    def run(picked: Any) -> torch.Tensor:
        history = torch.zeros(rows, 4, dtype=torch.int32)
        op.run(history, places[picked] // 4, places[picked] % 4, tokens[picked])
        return history.flatten()[places[picked]]

    check_company(run, rows, seed)


def write_kv_transposed(label: str, rows: int, seed: int) -> None:
    write_kv(label, rows, seed, {"key": (2, 8, 4), "value": (2, 4, 8)}, "transposed_keys")


def write_kv(
    label: str,
    rows: int,
    seed: int,
    shapes: Mapping[str, tuple[int, int, int]] = {"key": (4, 2, 8), "value": (4, 2, 8)},
    layout: str = "paged",
) -> None:
    """Rows of one request written in one step, or each in its own."""
    shape: dict[str, Any] = {"kv_heads": 2, "head_dim": 8, "dtype": "float32", "cache_dtype": "float32"}
    request = WriteKVRequest(cache_group="full", block_size=4, demands=DEMANDS | {f"kv_layout:{layout}"}, **shape)
    op, key, value = operator(request, label), normal(rows, 2, 8, seed=1), normal(rows, 2, 8, seed=2)
    table = torch.randperm(-(-rows // 4), generator=torch.Generator().manual_seed(seed)).to(torch.int32)[None] + 1

    def cache() -> dict[str, torch.Tensor]:
        return {name: torch.zeros(-(-rows // 4) + 1, *shape) for name, shape in shapes.items()}

    together, apart = cache(), cache()
    op.run(key, value, together, layout_of(table, 4, [rows], [rows]))
    for row in range(rows):
        op.run(key[row : row + 1], value[row : row + 1], apart, layout_of(table, 4, [1], [row + 1]))
    assert all(same_bits(together[name], apart[name]) for name in together)


def stage(name: str) -> Check:
    return lambda label, rows, seed: check_stage(operator(request_of(name), label), name, rows, seed)


def request_of(name: str) -> SamplingRequest:
    return SamplingRequest(stage=name, vocab_size=STAGES.vocab, demands=DEMANDS)


CHECKS: dict[str, Check] = {
    "reference:embedding": embedding,
    **{f"{owner}:{name}": check for owner in ("reference", "cpu") for name, check in (
        ("input_ids", input_ids),
        ("slot_mapping", slot_mapping),
        ("append_tokens", append_tokens),
        ("write_kv", write_kv),
    )},
    "cpu:write_kv_transposed": write_kv_transposed,
    **{f"reference:{name}": stage(name) for name in ("mask", "bias", "penalties", "temperature")},
    **{f"cpu:{name}": stage(name) for name in ("mask", "top_k", "top_p", "draw", "logprobs")},
}  # fmt: skip


@pytest.mark.parametrize("label", CHECKS)
@settings(max_examples=8)
@given(rows=st.integers(1, MOST_ROWS), seed=st.integers(0, 99))
def test_a_row_has_the_same_bits_in_any_company(label: str, rows: int, seed: int) -> None:
    CHECKS[label](label, rows, seed)


IN_SEVERAL_PROCESSES = {"reference:all_to_all"}
"""Checked by tests/conformance/test_moe_communication.py, which starts them."""


def test_every_declaration_of_the_core_is_checked() -> None:
    declared = {f"{owner}:{p.name}" for owner, p in providers() if owner != "batch_invariance" and CAP in p.caps}
    assert declared == set(CHECKS) | IN_SEVERAL_PROCESSES


def test_companies_cover_rows_alone_and_all_together() -> None:
    found = companies(20, 0)
    assert [min(map(len, found)), max(map(len, found))] == [1, 20]
