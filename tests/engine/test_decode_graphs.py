"""Recorded decode steps say what steps run operator by operator say, whatever is padded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import recording_device

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError
from deepinfer_core.engine.decode_graphs import rows_grid

CONFIG: dict[str, Any] = {
    "plugins.paths": ["toys.recording_device"],
    "scheduling.max_running": 12,
    "scheduling.max_batch_tokens": 40,
    "kv_cache.block_size": 4,
    "kv_cache.num_blocks": 120,
    "logging.progress": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            use_sliding_window=True,
            sliding_window=9,
            max_window_layers=1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.generation_config.eos_token_id = None
    path = tmp_path_factory.mktemp("qwen3")
    model.float().save_pretrained(path)
    return path


def tokens(checkpoint: Path, prompts: list[list[int]], lengths: list[int], **settings: Any) -> list[list[int]]:
    config = CONFIG | {name.replace("__", "."): value for name, value in settings.items()}
    params = [
        SamplingParams(temperature=0.8, seed=n, max_tokens=length, ignore_eos=True) for n, length in enumerate(lengths)
    ]
    with LLM(checkpoint, accelerator="recording", dtype="float32", config=config) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [120, 30])
def test_recorded_steps_give_the_same_tokens(checkpoint: Path, ahead: bool, blocks: int) -> None:
    """Ragged requests that come and go, so that sizes shrink and rows of those that ended are padding later."""
    prompts = [[1 + (n * 7 + i) % 60 for i in range(1 + 5 * n % 23)] for n in range(11)]
    lengths = [3 + 4 * n % 29 for n in range(11)]
    settings = {"scheduling__async_scheduling": ahead, "kv_cache__num_blocks": blocks}
    expected = tokens(checkpoint, prompts, lengths, scheduling__decode_graphs=False, **settings)
    recording_device.REPLAYS.clear()
    assert tokens(checkpoint, prompts, lengths, **settings) == expected
    assert {1, 2, 4, 8} <= set(recording_device.REPLAYS)


def test_padding_touches_the_null_block_alone(checkpoint: Path) -> None:
    """Rows past a step's own: token 0 of a request of one token whose blocks are all the null block."""
    padded = []
    with LLM(checkpoint, accelerator="recording", dtype="float32", config=CONFIG) as llm:
        graphs = llm.engine.core.runner.graphs
        assert graphs is not None
        inner, buffers = graphs.run, graphs._buffers

        def run(inputs: Any, history: Any) -> Any:
            found, rows = inner(inputs, history), len(inputs.positions)
            size = next(size for size in rows_grid(12) if size >= rows)
            padded.append(size - rows)
            assert not buffers.positions[rows:size].any()
            assert (buffers.seq_lens[rows:size] == 1).all()
            assert not any(table[rows:size].any() for table in buffers.tables.values())
            return found

        graphs.run = run  # type: ignore[method-assign]
        params = [SamplingParams(temperature=0, max_tokens=4 + 3 * n, ignore_eos=True) for n in range(11)]
        assert not any(o.error for o in llm.generate([[1 + n] * (3 + n) for n in range(11)], params))
    assert max(padded) > 2


def test_cached_prompts_leave_shared_blocks_alone(checkpoint: Path) -> None:
    """A full prefix hit is one row that must not write its block: that step is not a recorded one."""
    prompts = [[5] * 16] * 4
    with LLM(checkpoint, accelerator="recording", dtype="float32", config=CONFIG) as llm:
        graphs, redirected = llm.engine.core.runner.graphs, []
        assert graphs is not None
        takes = graphs.takes

        def asked(inputs: Any) -> bool:
            if inputs.redirect_below is not None:
                redirected.append(takes(inputs))
            return takes(inputs)

        graphs.takes = asked  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=6)
        found = [llm.generate(prompts, params)[0].outputs[0].token_ids for _ in range(3)]
        assert redirected
        assert not any(redirected)
    with LLM(checkpoint, accelerator="cpu", dtype="float32", config=CONFIG) as llm:
        assert found == [llm.generate(prompts[0], params)[0].outputs[0].token_ids] * 3


def test_explain_says_whether_steps_are_recorded(checkpoint: Path) -> None:
    def fact(accelerator: str, **settings: Any) -> str:
        with LLM(checkpoint, accelerator=accelerator, dtype="float32", config=CONFIG | settings) as llm:
            return str(llm.explain()["facts"]["decode_graphs"])

    assert fact("recording") == "recorded"
    assert "is false" in fact("recording", **{"scheduling.decode_graphs": False})
    assert "records no graphs" in fact("cpu")
    unrecorded = {"ops.pointwise.swiglu": ["reference:swiglu"]}
    assert "reference:swiglu" in fact("recording", **unrecorded)
    with pytest.raises(ConfigError, match=r"decode_graphs=true: cannot be recorded: reference:swiglu"):
        fact("recording", **unrecorded, **{"scheduling.decode_graphs": True})


@given(st.integers(1, 1024))
def test_every_number_of_rows_finds_a_graph(most: int) -> None:
    grid = rows_grid(most)
    assert grid[-1] == most
    assert list(grid) == sorted(set(grid))
    assert all(larger - size <= max(1, size) or larger - size <= 32 for size, larger in pairwise(grid))
