"""No operator names a device: with another default device, a tensor made on it would not mix with the inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_support import batch, layout, operator, stage

import deepinfer_core.reference
from deepinfer_core.api import (
    STAGES,
    AppendTokensRequest,
    CacheEntry,
    CacheGroupSpec,
    EmbeddingRequest,
    InputIdsRequest,
    KVLayoutRequest,
    LinearRequest,
    PagedAttentionRequest,
    RmsNormRequest,
    RopeRequest,
    SlotMappingRequest,
    SwigluRequest,
    WriteKVRequest,
)


def run_stages() -> None:
    row = {
        "prompt": [1, 2],
        "output": [3],
        "temperature": 0.7,
        "min_p": 0.01,
        "top_p": 0.9,
        "top_k": 5,
        "presence": 0.1,
        "bias": {1: 1.0},
        "bad_words": [[3, 4]],
        "allowed": list(range(9)),
        "grammar": list(range(9)),
        "stop_ids": [5],
        "min_end": 9,
    }
    logits, step = torch.linspace(0, 1, 10)[None], batch([row], 10)
    operators = [stage(name, 10) for name in STAGES]
    ids = torch.tensor([1])
    probabilities = stage("logprobs", 10)
    with torch.device("meta"):
        probabilities.run(logits, ids, 2)
        for op in operators:
            logits = op.run(logits, step)


def run_attention() -> None:
    shape: dict[str, Any] = {
        "cache_group": "full",
        "kv_heads": 1,
        "head_dim": 4,
        "dtype": "float32",
        "cache_dtype": "float32",
        "block_size": 2,
    }
    write = operator(WriteKVRequest(**shape))
    paged = operator(PagedAttentionRequest(q_heads=2, scale=0.5, window=2, sinks=True, **shape))
    where, blocks = layout([2, 1], [3, 1], 2)
    group = CacheGroupSpec(
        name="full", layers=1, entries=tuple(CacheEntry(name, (1, 4), "float32") for name in ("key", "value"))
    )
    kv, query, sinks = torch.ones(3, 1, 4), torch.ones(3, 2, 4), torch.zeros(2)
    memory = operator(KVLayoutRequest(group=group, block_size=2))
    with torch.device("meta"):
        (cache,) = memory.allocate(blocks)
        write.run(kv, kv, cache, where)
        result = paged.run(query, cache, paged.plan(where), sinks)
    assert result.device.type == "cpu"


def run_gemm() -> None:
    op = operator(LinearRequest(in_features=4, out_features=2, dtype="float32", out_dtype="float32", weight_dtype=""))
    weight, x = torch.ones(2, 4), torch.ones(1, 4)
    with torch.device("meta"):
        assert op.run(x, op.prepare([weight], weight[:, 0])).device.type == "cpu"


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope(kind: str) -> None:
    scaling = {"factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8}
    request = RopeRequest(
        head_dim=4, rotary_dim=4, theta=1e4, dtype="float32", max_positions=8, scaling={"rope_type": kind, **scaling}
    )
    x, positions = torch.ones(1, 1, 4), torch.tensor([3])
    with torch.device("meta"):
        op = operator(request)
        assert op.run(x, op.plan(positions)).device.type == "cpu"


def run_pointwise() -> None:
    norm = operator(RmsNormRequest(hidden=4, eps=1e-6, dtype="float32"))
    swiglu = operator(SwigluRequest(width=2, dtype="float32", limit=1.0))
    embedding = operator(EmbeddingRequest(vocab_size=4, hidden=4, dtype="float32", weight_dtype="float32"))
    x, weight, ids = torch.ones(1, 4), torch.ones(4), torch.tensor([3])
    with torch.device("meta"):
        norm.add(x, x, weight)
        swiglu.run(x)
        embedding.run(ids, embedding.prepare(x.expand(4, 4)))


def run_runner() -> None:
    history, index = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    ids, append = operator(InputIdsRequest()), operator(AppendTokensRequest())
    slots = operator(SlotMappingRequest(block_size=2))
    with torch.device("meta"):
        ids.run(history, index, index)
        slots.run(history, index, index)
        append.run(history, index, index, index)


@pytest.mark.parametrize("run", [run_stages, run_attention, run_gemm, run_pointwise, run_runner])
def test_operators(run: Callable[[], None]) -> None:
    run()


def test_no_source_file_names_a_device() -> None:
    folder = Path(deepinfer_core.reference.__file__).parent
    assert [path.name for path in folder.glob("*.py") if '"cpu"' in path.read_text()] == []
