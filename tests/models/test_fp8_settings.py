"""``kv_cache.dtype`` and ``model.fp8_activations`` through the engine, against models computed plainly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from toys.checkpoints import ACCELERATOR
from toys.dense import SIZES, VOCAB
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from v4.released import pack_all, released_config, released_tensors, write
from v4.support import Stepper, random_tokens

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError

SEED = random.randrange(2**31)
TOKENS = random_tokens(3, 33)
E4M3_UNIT = 2.0**-4


def log_probs(directory: Path, prompt: list[int], **settings: Any) -> torch.Tensor:
    """``[len(prompt) - 1]``: of each token of the prompt after the first."""
    plain = {"kv_cache.block_size": 4, "kv_cache.num_blocks": 65, "logging.progress": False}
    with LLM(directory, accelerator=ACCELERATOR, **plain | settings) as llm:
        assert {e.dtype for g in llm.engine.planned.spec.cache_groups for e in g.entries} == {
            "float8_e4m3fn" if settings.get("kv_cache.dtype") == "fp8" else "float32"
        }
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        found = [
            entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True) if entry
        ]
        return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cache_in_fp8_changes_results_a_little(kind: str, tmp_path: Path) -> None:
    """By something, and by no more than a few roundings of keys and values do to these tiny models."""
    torch.manual_seed(SEED)
    config, model = (LlamaConfig, LlamaForCausalLM) if kind == "llama" else (Qwen3Config, Qwen3ForCausalLM)
    sliding = {} if kind == "llama" else {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    model(config(**SIZES, **sliding)).save_pretrained(tmp_path)
    prompt = torch.randint(VOCAB, (40,)).tolist()
    plain = log_probs(tmp_path, prompt)
    kept = log_probs(tmp_path, prompt, **{"kv_cache.dtype": "fp8"})
    moved = (plain - kept).abs()
    assert float(moved.max()) > 1e-4
    assert float(moved.mean()) < 8 * E4M3_UNIT * float(plain.std())


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packed = pack_all(released_tensors(tmp_path_factory.mktemp("saved"), SEED))
    return write(tmp_path_factory.mktemp("released"), packed, released_config())


def test_models_without_plain_keys_and_values_refuse_a_cache_in_fp8(released: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype='fp8'.*DeepseekV4ForCausalLM.*'auto'"):
        Stepper(released, **{"kv_cache.dtype": "fp8"})


def test_inputs_of_packed_weights_are_rounded_on_request(released: Path) -> None:
    def step(on: bool) -> tuple[Stepper, torch.Tensor]:
        stepper = Stepper(released, **{"model.qdq": "off", "model.fp8_activations": on})
        return stepper, stepper.step([(0, TOKENS, 0)])

    (_, plain), (stepper, rounded) = step(False), step(True)
    requests = {name: r for name, r in stepper.spec.ops.items() if r.op == "gemm.linear"}
    packed = {name for name, r in requests.items() if r.weight_dtype.startswith(("fp8:", "fp4:"))}
    assert {name for name, r in requests.items() if r.activations} == packed
    assert len(packed) >= 5
    moved = (plain - rounded).abs()
    assert 1e-4 < float(moved.mean()) < 0.5 * float(plain.std())
