"""The block size of a model with several compression rates, set or left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from v4.support import CSA, HCA, random_model

from deepinfer_core.api import ConfigError
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.config import load_config
from deepinfer_core.engine.planning import make_plan


def test_a_block_size_nobody_set_suits_the_model(tmp_path: Path) -> None:
    random_model(3, compress_rates={CSA: 4, HCA: 24}).save_pretrained(tmp_path)
    overrides: dict[str, Any] = {"model.path": str(tmp_path)}
    with open_checkpoint(tmp_path) as checkpoint:
        planned = make_plan(load_config(overrides=overrides), checkpoint, {})
        assert planned.config.kv_cache.block_size == 48
        assert planned.config.sources["kv_cache.block_size"] == "default, for DeepseekV4ForCausalLM"
        assert {r.block_size for r in planned.spec.ops.values() if hasattr(r, "block_size")} == {48}
        with pytest.raises(ConfigError, match=r"kv_cache\.block_size=16: DeepseekV4ForCausalLM needs a multiple of 24"):
            make_plan(load_config(overrides=overrides | {"kv_cache.block_size": 16}), checkpoint, {})
