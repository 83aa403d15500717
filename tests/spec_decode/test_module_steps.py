"""Steps that a draft module reads are not recorded, and ``explain`` says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys.tiny_qwen3 import write_tiny_qwen3

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def opened(checkpoint: Path, method: str, **settings: Any) -> LLM:
    config = {
        "plugins.paths": ["toys.recording_device"],
        "plugins.spec_decode.draft_model": str(checkpoint),
        "speculation.method": method,
        "kv_cache.num_blocks": 60,
        "kv_cache.block_size": 4,
        "scheduling.max_running": 4,
        "logging.progress": False,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return LLM(checkpoint, accelerator="recording", dtype="float32", config=config | given)


def test_explain_says_how_steps_run(checkpoint: Path) -> None:
    for method, fact in (("ngram", "recorded"), ("draft_model", "operator by operator: a draft module reads")):
        with opened(checkpoint, method) as llm:
            assert llm.explain()["facts"]["decode_graphs"].startswith(fact)
            assert (llm.engine.core.runner.graphs is not None) == (method == "ngram")
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6))
            assert output.error is None
    with pytest.raises(ConfigError, match="decode_graphs=true: a draft module reads every step"):
        opened(checkpoint, "draft_model", scheduling__decode_graphs=True)
