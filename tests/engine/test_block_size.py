"""The block size where nobody set one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import write_toy

from deepinfer_core import load_config
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.engine.planning import PlannedEngine, make_plan


def planned(directory: Path, **settings: Any) -> PlannedEngine:
    path = write_toy(directory, "Count")
    overrides = {"model.path": str(path), "accelerator": "cpu", "plugins.paths": ["toys.plugin"], **settings}
    with open_checkpoint(path) as checkpoint:
        return make_plan(load_config(overrides=overrides), checkpoint, {})


def test_the_device_says_what_suits_it(tmp_path: Path) -> None:
    config = planned(tmp_path).config
    assert config.kv_cache.block_size == 64
    assert config.sources["kv_cache.block_size"] == "default, for cpu"


@pytest.mark.parametrize("size", [5, 16])
def test_the_users_word_is_the_last(tmp_path: Path, size: int) -> None:
    found = planned(tmp_path, **{"kv_cache.block_size": size})
    assert found.config.kv_cache.block_size == size
    assert {r.block_size for r in found.spec.ops.values() if hasattr(r, "block_size")} <= {size}
