"""After ``deepinfer warmup`` no request needs a kernel that is not compiled: told from launches in the interpreter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import warmup
from deepinfer_nvidia_sm100.ops import chain, temperature
from deepinfer_nvidia_sm100.warm_tables import run_tables
from gpu_support import ON_GPU, operator
from test_nvidia_attention import INVARIANT, request
from test_nvidia_engine import BACKEND, dense, plugin_paths
from test_reference_attention import Scene

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli.command_host import ProgramHost

pytestmark = pytest.mark.skipif(ON_GPU, reason="watches the interpreter")

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top-k alone": {"temperature": 1.0, "top_k": 7},
    "top-p alone": {"temperature": 1.0, "top_p": 0.6},
    "both": {"temperature": 1.0, "top_k": 7, "top_p": 0.6},
    "min-p and top-k": {"top_k": 5, "min_p": 0.1, "temperature": 1.3},
    "min-p and top-p": {"top_p": 0.5, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.3},
    "2 biases": {"logit_bias": {1: 1.0, 2: 2.0}},
    "23 biases": {"logit_bias": dict.fromkeys(range(23), 1.0)},
    "one allowed": {"allowed_token_ids": [7]},
    "many allowed": {"allowed_token_ids": list(range(100))},
    "min_tokens": {"min_tokens": 2},
    "stop ids": {"stop_token_ids": [1, 2, 3]},
    "one logprob": {"logprobs": 1},
    "20 logprobs": {"logprobs": 20},
    "processed": {"logprobs": 2, "logprobs_mode": "processed", "top_k": 5},
    "prompt logprobs": {"prompt_logprobs": 1},
    "3 completions": {"n": 3},
    "several": {"repetition_penalty": 1.1, "top_k": 9, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4, 5]},
}


@pytest.mark.parametrize("queries", [[1], [1, 1, 1], [2, 1], [40, 1]])
@pytest.mark.parametrize("invariant", [False, True])
def test_the_width_of_the_block_table_needs_no_kernel_of_its_own(queries: list[int], invariant: bool) -> None:
    """It follows the longest context of a step, so that some requests would meet a width that no warm-up had."""
    from launches import recorded_launches

    scene = Scene(queries, [max(queries) + 2] * len(queries), block_size=64)
    wanted = request(block_size=64, demands=INVARIANT if invariant else frozenset({"kv_layout:paged"}))
    op = operator(wanted)
    keys = []
    for width in (1, 2, 3, 16, 48):
        table = torch.nn.functional.pad(scene.layout.block_table, (0, width - scene.layout.block_table.shape[1]))
        layout = attrs.evolve(scene.layout, block_table=table.contiguous())
        with recorded_launches() as launched:
            op.run(scene.query, scene.cache, op.plan(layout))
        keys.append(set(launched))
    assert keys[0]
    assert all(found == keys[0] for found in keys)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"features.batch_invariant": True}], ids=["default", "batch_invariant"])
def test_no_request_compiles_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    from launches import recorded_launches

    dense("qwen3").float().save_pretrained(tmp_path)
    assert max(chain.LEVELLED, temperature.MANY) <= warmup.MANY
    for place, name in ((warmup, "TOGETHER"), (warmup, "MANY"), (chain, "LEVELLED"), (temperature, "MANY")):
        monkeypatch.setattr(place, name, 2)
    monkeypatch.setattr(temperature, "WIDE", 1)
    monkeypatch.setattr(warmup, "LENGTHS", (1, 5, 40, 70))
    config = {
        "plugins.paths": plugin_paths(),
        "kv_cache.num_blocks": 65,
        "kv_cache.block_size": 16,
        "scheduling.max_running": 4,
        "logging.progress": False,
        "fallback": "allow",
        **settings,
    }
    rng = random.Random(random.randrange(10**6))

    def opened() -> LLM:
        return LLM(tmp_path, accelerator=BACKEND, dtype="float32", config=config)

    with recorded_launches() as warm, opened() as llm:
        limits = llm.engine.intake.limits
        for batch in warmup.batches(ProgramHost(), limits.max_model_len):
            warmup.run(llm, batch)
        run_tables(llm)
    with recorded_launches() as later, opened() as llm:

        def generate(prompts: list[list[int]], params: Any) -> None:
            assert not any(o.error for o in llm.generate(prompts, params, progress=False))

        kinds = [SamplingParams(max_tokens=2, ignore_eos=True, **fields) for fields in KINDS.values()]
        for params in kinds:
            generate([[rng.randrange(128) for _ in range(rng.randrange(1, 9))]], params)
        generate([[rng.randrange(128)] * rng.randrange(1, 12) for _ in kinds], rng.sample(kinds, len(kinds)))
        for length in (2, 16, 17, 64, 128):
            generate([[3] * length], SamplingParams(temperature=0, max_tokens=2))
    assert len(later) > 15
    assert sorted(later - warm) == []
