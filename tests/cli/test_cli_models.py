"""``deepinfer inspect`` and ``deepinfer explain`` on tiny checkpoints; memory against counting by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_checkpoint import HEAD, KV_HEADS, LAYERS, parameters
from cli_fakes import Run
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.api import PARTS, CacheEntry, CacheGroupSpec, ModelSpec
from deepinfer_core.cli.memory import cache_needs


def inspected(run: Run, *arguments: str) -> dict[str, Any]:
    result = run("inspect", *arguments, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_inspect_counts_weights_and_cache(run: Run, checkpoint: Path) -> None:
    found = inspected(run, str(checkpoint), "--dtype", "float32", "--context", "20", "--batch", "3")
    assert (found["architecture"], found["format"]) == ("LlamaForCausalLM", "safetensors")
    assert (found["num_parameters"], found["weight_bytes"]) == (parameters(), 4 * parameters())
    assert found["cache_bytes_per_token"] == LAYERS * 2 * KV_HEADS * HEAD * 4
    # 20 tokens take one block of 64, which suits the host best, for each of 3 requests.
    assert found["cache_bytes"] == 3 * 64 * found["cache_bytes_per_token"]
    assert found["total_bytes"] == found["weight_bytes"] + found["cache_bytes"]


def test_inspect_follows_dtype_and_block_size(run: Run, checkpoint: Path) -> None:
    found = inspected(run, str(checkpoint), "--dtype", "bfloat16", "--set", "kv_cache.block_size=4", "--context", "20")
    assert found["weight_bytes"] == 2 * parameters()
    assert found["cache_bytes"] == 20 * LAYERS * 2 * KV_HEADS * HEAD * 2


def test_inspect_takes_the_whole_context_by_default(run: Run, checkpoint: Path) -> None:
    assert inspected(run, str(checkpoint))["context"] == 128


def test_inspect_prints_tables(run: Run, checkpoint: Path) -> None:
    out = run("inspect", str(checkpoint), "--context", "16").out
    for words in ("LlamaForCausalLM", f"{parameters():,}", "# stored tensors", "# cache", "# memory for 1 x 16 tokens"):
        assert words in out


def test_inspect_shows_a_checkpoint_that_nobody_runs(run: Run, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "architectures": ["Unheard"]}))
    found = inspected(run, str(checkpoint))
    assert (found["num_parameters"], found["runs"]) == (parameters(), False)
    assert "Unheard" in found["reason"]
    assert "does not run here: " in run("inspect", str(checkpoint)).out


def test_inspect_refuses_a_context_over_the_limit(refused: Callable[..., str], checkpoint: Path) -> None:
    assert refused("inspect", str(checkpoint), "--context", "129") == "--context 129: the limit here is 128 tokens"


def test_inspect_refuses_a_directory_without_configuration(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "config.json is missing" in refused("inspect", str(tmp_path))


def test_explain_without_a_model_shows_settings_and_device(run: Run) -> None:
    result = run("explain", "--json", "--set", "kv_cache.block_size=32")
    found = json.loads(result.out)
    settings = {row["path"]: row for row in found["config"]}
    assert settings["kv_cache.block_size"] == {"path": "kv_cache.block_size", "value": 32, "source": "--set"}
    assert found["facts"]["accelerator"] == "cpu"


def test_explain_reads_no_weights_and_names_every_provider(run: Run, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(header_only(checkpoint / "model.safetensors"))
    result = run("explain", "--model", str(checkpoint), "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["rows"]
    parts = [row for row in found["rows"] if row["provider"] == PARTS]  # of regions that nobody serves whole
    served = [row for row in found["rows"] if row not in parts]
    assert all(row["provider"].partition(":")[2] and row["source"] for row in served)
    assert {row["slot"] for row in served} == {choice["slot"] for choice in found["plan"]["choices"]}
    assert found["facts"]["architecture"] == "LlamaForCausalLM"


def header_only(file: Path) -> bytes:
    """The file with its weights turned to NaN, so that reading one would show."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    return data[:length] + b"\xff" * (len(data) - length)


def test_explain_prints_tables(run: Run, checkpoint: Path) -> None:
    out = run("explain", "--model", str(checkpoint)).out
    for title in ("# facts", "# plugins", "# operators", "# settings"):
        assert title in out
    assert "kv_cache.num_blocks" in out


def test_explain_says_why_only_when_asked(run: Run, checkpoint: Path) -> None:
    plain = run("explain", "--model", str(checkpoint)).out
    why = run("explain", "--model", str(checkpoint), "--why").out
    assert "# not chosen" not in plain
    assert "# not chosen" in why


def test_explain_twice_says_the_same(run: Run, checkpoint: Path) -> None:
    first, second = (run("explain", "--model", str(checkpoint), "--json").out for _ in range(2))
    assert first == second


def test_explain_refuses_a_provider_that_is_not_there(refused: Callable[..., str], checkpoint: Path) -> None:
    text = refused("explain", "--model", str(checkpoint), "--set", "ops.gemm.linear=reference:fast")
    assert "reference:fast" in text


def spec_with(group: CacheGroupSpec) -> ModelSpec:
    return ModelSpec(
        architecture="A",
        vocab_size=10,
        max_model_len=1000,
        dtype="float32",
        num_layers=group.layers,
        hidden_size=8,
        cache_groups=(group,),
        ops={},
        tensors={},
    )


@given(
    context=st.integers(1, 300),
    window=st.integers(1, 80),
    block_size=st.integers(1, 32),
    start=st.integers(0, 1000),
)
def test_window_blocks_are_enough_wherever_the_window_lies(
    context: int, window: int, block_size: int, start: int
) -> None:
    entries = (CacheEntry("kv", (4,), "float32"),)
    group = CacheGroupSpec(name="w", kind="window", layers=1, entries=entries, window=window)
    (need,) = cache_needs(spec_with(group), block_size=block_size, context=context, batch=1)
    last = min(start, context - 1)
    held = {position // block_size for position in range(max(0, last - window + 1), last + 1)}
    assert len(held) <= need.blocks <= -(-context // block_size)
    assert need.num_bytes == need.blocks * block_size * 16


def test_compressed_rows_cost_their_share() -> None:
    entries = (CacheEntry("c", (3,), "bfloat16"), CacheEntry("s", (), "float32"))
    group = CacheGroupSpec(name="c", layers=5, entries=entries, tokens_per_row=4)
    (need,) = cache_needs(spec_with(group), block_size=8, context=9, batch=2)
    assert need.bytes_per_token == 5 * (3 * 2 + 4) / 4
    # Two blocks of two rows for each request.
    assert need.num_bytes == 2 * 2 * 2 * 5 * 10
