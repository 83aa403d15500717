"""Every model on a device type that no part of the core has heard of: torch's PrivateUse1, registered from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toys.dense import SIZES
from toys.far_tensor import SETUP
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from v4.support import random_model

ROOT = Path(__file__).parents[2]
MODELS = ("llama", "qwen3", "deepseek_v4")

pytestmark = [
    pytest.mark.private_use,
    pytest.mark.skipif(SETUP is None, reason="this torch cannot register a device type from Python (a private API)"),
]

SCRIPT = """
import json, sys
from deepinfer_core import LLM, SamplingParams
from toys import far_tensor
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
drawn = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=7, frequency_penalty=0.3, max_tokens=12,
                       ignore_eos=True)
prompts = [[5, 9, 2], list(range(40)), [7]]
small = {"kv_cache.num_blocks": 65, "kv_cache.block_size": 16, "logging.progress": False,
         "plugins.paths": ["toys.far_device"], "scheduling.max_batch_tokens": 32}
found = {}
for path in sys.argv[1:]:
    for backend in ("cpu", "far"):
        before = far_tensor.calls
        with LLM(path, accelerator=backend, dtype="float32", **small) as llm:
            results = [llm.generate(prompts, params) for params in (greedy, drawn)]
            plan = llm.explain()["plan"]
            caches = {t.device.type for group in llm.engine.core.runner.layer_caches.values()
                      for layer in group for t in layer.values()}
        found.setdefault(path, {})[backend] = {
            "tokens": [[r.outputs[0].token_ids for r in some] for some in results],
            "errors": [r.error and str(r.error) for some in results for r in some],
            "logprobs": [[e[t].logprob for t, e in zip(r.outputs[0].token_ids, r.outputs[0].logprobs)]
                         for r in results[0]],
            "providers": sorted({c["provider"].partition(":")[0] for c in plan["choices"]}),
            "loop": plan["facts"]["loop"],
            "caches": sorted(caches),
            "operations": far_tensor.calls - before,
        }
print(json.dumps(found))
"""


def model(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "deepseek_v4":
        return random_model(3)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **windows}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each model said on both devices, in a process of its own: a device type cannot be taken back."""
    folder = tmp_path_factory.mktemp("far")
    for kind in MODELS:
        made = model(kind)
        made.generation_config.eos_token_id = made.config.eos_token_id = None
        made.float().save_pretrained(folder / kind)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(str(folder / kind) for kind in MODELS)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(path).name: value for path, value in json.loads(done.stdout).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_runs_and_says_what_it_says_on_the_host(found: dict[str, Any], kind: str) -> None:
    host, far = found[kind]["cpu"], found[kind]["far"]
    assert far["errors"] == [None] * 6
    for ours, theirs in zip(far["logprobs"], host["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert far["tokens"] == host["tokens"]


@pytest.mark.parametrize("kind", MODELS)
def test_it_really_ran_there_on_reference_operators(found: dict[str, Any], kind: str) -> None:
    far = found[kind]["far"]
    assert far["providers"] == ["reference"]
    assert far["caches"] == ["far"]
    assert far["operations"] > 1000
    assert far["loop"] == "one step ahead"
    assert found[kind]["cpu"]["operations"] == 0
