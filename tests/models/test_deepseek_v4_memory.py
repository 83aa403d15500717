"""The memory that ``deepinfer inspect`` shows for checkpoints in the released layout, against counting by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from v4.released import pack_all, released_config, released_tensors, write
from v4.support import Stepper, plan_of

from deepinfer_core.api import QuantisedWeight
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.cli import main
from deepinfer_core.cli.memory import packed_slots, weight_bytes
from deepinfer_core.models.deepseek_v4.config import V4Config
from deepinfer_core.models.deepseek_v4.slots import slot_of
from deepinfer_core.models.deepseek_v4.tensors import draft_tensors, main_tensors


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return released_tensors(tmp_path_factory.mktemp("saved"), 5)


@pytest.fixture(scope="module")
def packed(floats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return pack_all(floats)


@pytest.fixture(scope="module")
def released(packed: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("released"), packed, released_config())


def estimate(path: Path, **settings: Any) -> int:
    planned = plan_of(path, **settings)
    with open_checkpoint(path) as checkpoint:
        return weight_bytes(planned.spec, checkpoint.weights, packed_slots(planned))


def by_hand(floats: dict[str, torch.Tensor], packed: dict[str, torch.Tensor], size: int) -> int:
    """Experts as stored, tables of integers as they are, all else in ``size`` bytes an element and without scales."""
    total = 0
    for name, tensor in packed.items():
        if ".experts." in name or tensor.dtype == torch.int64:
            total += tensor.nbytes
        elif not name.endswith(".scale"):
            total += floats[name].numel() * size
    return total


def test_packed_experts_count_as_stored(
    released: Path, floats: dict[str, torch.Tensor], packed: dict[str, torch.Tensor]
) -> None:
    assert estimate(released, **{"model.dtype": "float32"}) == by_hand(floats, packed, 4)


def test_bfloat16_computes_some_projections_in_float32(
    released: Path, floats: dict[str, torch.Tensor], packed: dict[str, torch.Tensor]
) -> None:
    """The router and the poolings' projections, by their requests."""
    wide = sum(t.numel() for n, t in floats.items() if n.endswith((".gate.weight", ".wkv.weight", ".wgate.weight"))
               and "attn.wkv" not in n)  # fmt: skip
    assert wide > 0
    assert estimate(released, **{"model.dtype": "bfloat16"}) == by_hand(floats, packed, 2) + 2 * wide


def test_the_experts_estimate_is_what_a_loaded_model_holds(released: Path) -> None:
    model = Stepper(released, **{"model.dtype": "float32"}).model
    parts = [p for b in model.blocks for w in (b.experts.gate_up, b.experts.down) for group in w for p in group]
    assert parts
    assert all(isinstance(part, QuantisedWeight) for part in parts)
    planned = plan_of(released, **{"model.dtype": "float32"})
    experts = {n: t for n, t in planned.spec.tensors.items() if t.slot in ("expert_gate_up", "expert_down")}
    with open_checkpoint(released) as checkpoint:
        stored = sum(checkpoint.weights.describe(name).num_bytes for name in experts)
    assert sum(part.data.nbytes + part.scale.nbytes for part in parts) == stored


def test_a_provider_that_decodes_counts_decoded_weights(
    released: Path, floats: dict[str, torch.Tensor], packed: dict[str, torch.Tensor]
) -> None:
    """No slot packed: every expert in the compute type."""
    planned = plan_of(released, **{"model.dtype": "float32"})
    with open_checkpoint(released) as checkpoint:
        found = weight_bytes(planned.spec, checkpoint.weights, packed=())
    integers = sum(tensor.nbytes for tensor in packed.values() if tensor.dtype == torch.int64)
    assert found == integers + 4 * sum(t.numel() for t in floats.values() if t.dtype != torch.int64)


def test_draft_tensors_are_not_counted(released: Path, packed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    config = released_config(drafts=1)
    drafts = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in draft_tensors(V4Config.read(config))}
    both = write(tmp_path / "drafts", packed | drafts, config)
    assert set(drafts) <= set(plan_of(both).spec.tensors)
    assert estimate(both) == estimate(released)


def test_plain_weights_count_in_the_compute_type(floats: dict[str, torch.Tensor], tmp_path: Path) -> None:
    config = {k: v for k, v in released_config().items() if k not in ("quantization_config", "expert_dtype")}
    path = write(tmp_path / "plain", floats, config)
    assert estimate(path, **{"model.dtype": "float32"}) == sum(tensor.nbytes for tensor in floats.values())


def test_inspect_shows_it(released: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(released), "--json", "--context", "64", "--set", "kv_cache.block_size=16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] is True
    assert found["weight_bytes"] == estimate(released)
    assert {group["group"] for group in found["cache_groups"]} >= {"window", "csa", "hca", "index"}


def test_every_matrix_has_its_operator(released: Path) -> None:
    """Each operator with weights has tensors, and what is left over are vectors and tables."""
    config = V4Config.read(released_config())
    slots = {name: slot_of(name, config) for name, _ in main_tensors(config)}
    ops = plan_of(released).spec.ops
    assert {slot for slot in slots.values() if slot} == {
        s for s, request in ops.items() if hasattr(request, "weight_dtype")
    }
    left = [name for name, slot in slots.items() if not slot and "hc_" not in name]
    assert all(name.endswith(("norm.weight", "ape", "bias", "tid2eid", "attn_sink")) for name in left)
