"""A GPU whose memory is full to the last MiB: requests end as they would with room, and the engine goes on.

``FILL_GPU=1 pytest tests/nvidia_sm100/test_nvidia_full_memory.py``, on a GPU that nothing else uses.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_support import ON_GPU
from test_nvidia_engine import plugin_paths
from toys.tiny_qwen3 import write_tiny_qwen3

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import DeviceError
from deepinfer_core.engine.decode_graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(
    not ON_GPU or os.environ.get("FILL_GPU") != "1", reason="takes all memory of a GPU: asked for by FILL_GPU=1"
)
PROMPTS = [[(7 * i + 3 * j) % 2000 for j in range(100 + 61 * i % 1500)] for i in range(48)]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8 + i, ignore_eos=True) for i in range(48)]


@contextmanager
def filled(leave: int) -> Iterator[None]:
    """All memory but so many bytes is taken."""
    gc.collect()
    torch.cuda.empty_cache()
    held: list[torch.Tensor] = []
    size = 1 << 34
    while size >= 1 << 20:
        if torch.cuda.mem_get_info()[0] - size < leave:
            size //= 2
            continue
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 4096}
    return write_tiny_qwen3(
        tmp_path_factory.mktemp("qwen3"), **sizes, num_attention_heads=8, num_key_value_heads=2, head_dim=64
    )


def opened(checkpoint: Path, running: int = 64) -> LLM:
    config = {
        "plugins.paths": plugin_paths(),
        "kv_cache.num_blocks": 1200,
        "kv_cache.block_size": 16,
        "scheduling.max_running": running,
        "scheduling.max_batch_tokens": 8192,
        "logging.progress": False,
    }
    return LLM(checkpoint, accelerator="nvidia_sm100", dtype="float32", config=config)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert not any(output.error for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_steps_become_smaller_until_they_fit(checkpoint: Path) -> None:
    with opened(checkpoint) as llm:
        expected = tokens(llm)
        for mebibytes in (48, 4):
            with filled(mebibytes << 20):
                assert tokens(llm) == expected
            assert llm.engine.core.planner.budget < 8192


def test_steps_that_cannot_be_recorded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(checkpoint, 256) as llm:
        expected = tokens(llm)
    capture = DecodeGraphs.capture

    def without_room(self: DecodeGraphs) -> int:
        with filled(1 << 20):
            return capture(self)

    monkeypatch.setattr(DecodeGraphs, "capture", without_room)
    with opened(checkpoint, 256) as llm:
        assert "the memory had no room" in llm.explain()["facts"]["decode_graphs"]
        assert tokens(llm) == expected


def test_a_start_without_room_is_one_line(checkpoint: Path) -> None:
    with filled(8 << 20), pytest.raises(DeviceError, match="out of memory while the engine starts"):
        opened(checkpoint)
