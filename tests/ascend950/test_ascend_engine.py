"""The whole engine on the Ascend plan, its operators emulated: the same logits as on the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys.engine_suite import run_engine_tests
from toys.seeds import module_seed
from transformers import Qwen3Config, Qwen3ForCausalLM
from v4.support import random_model, random_tokens

from deepinfer_core import LLM, RequestOutput, SamplingParams
from deepinfer_core.api import DeviceError, EnginePlan

SEED = module_seed(__name__)
OUT = 6
PROMPTS = [[(7 * i + n) % 90 for i in range(n)] for n in (1, 5, 127, 130)]
BLOCK = 128


def settings(**others: Any) -> dict[str, Any]:
    return {
        "plugins.paths": ["ascend950.emulated_backend"],
        "kv_cache.block_size": BLOCK,
        "kv_cache.num_blocks": 33,
        "logging.progress": False,
        "logging.level": "error",
        **others,
    }


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(SEED)
    if request.param == "qwen3":
        model: Any = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=96,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=128,
                max_position_embeddings=512,
                initializer_range=0.1,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    else:
        model = random_model(SEED)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.float().save_pretrained(path)
    return path


def run(
    checkpoint: Path,
    accelerator: str | None,
    params: Any,
    prompts: list[list[int]],
    dtype: str = "bfloat16",
    **others: Any,
) -> tuple[list[RequestOutput], EnginePlan]:
    named = {} if accelerator is None else {"accelerator": accelerator}
    with LLM(checkpoint, dtype=dtype, config=settings(**named, **others)) as llm:
        outputs = llm.generate([list(p) for p in prompts], params, progress=False)
        return outputs, llm.engine.planned.plan


def prompts_of(checkpoint: Path) -> list[list[int]]:
    return PROMPTS if "qwen3" in checkpoint.name else [random_tokens(SEED + n, n) for n in (5, 40, 130)]


def test_logits_agree_with_the_reference_operators(checkpoint: Path) -> None:
    """Qwen3 in bfloat16, as the fused attention wants, up to its roundings. V4 in float32: in bfloat16 a rounding
    may choose another expert, which moves logits as much as a wrong operator does."""
    dense = "qwen3" in checkpoint.name
    dtype, tolerance = ("bfloat16", 0.15) if dense else ("float32", 1e-3)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = prompts_of(checkpoint)
    ours, plan = run(checkpoint, "ascend950", params, prompts, dtype)
    native = {choice.op for choice in plan.choices if choice.provider.startswith("ascend950:")}
    assert native >= {"pointwise.rms_norm", "pointwise.rope", "pointwise.swiglu", "gemm.linear"}
    assert native >= ({"attention.write_kv", "attention.paged"} if dense else {"moe.exchange", "gemm.grouped"})
    theirs, other = run(checkpoint, "cpu", params, prompts, dtype, ops={op: ["reference"] for op in native})
    assert not {choice.op for choice in other.choices if choice.provider.startswith("cpu:")} & native
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.error is None
        assert mine.prompt_logprobs is not None
        assert reference.prompt_logprobs is not None
        for token, a, b in zip(
            mine.prompt_token_ids[1:], mine.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True
        ):
            assert a is not None
            assert b is not None
            assert abs(a[token].logprob - b[token].logprob) < tolerance, f"seed {SEED}"


@pytest.mark.parametrize(
    "others",
    [
        {"scheduling.async_scheduling": False},
        {"scheduling.max_batch_tokens": 128},
        {"kv_cache.num_blocks": 5},
        {"kv_cache.prefix_cache": False},
    ],
    ids=["sync", "chunked", "preempted", "no-prefix-cache"],
)
def test_every_way_of_running_gives_the_same_tokens(checkpoint: Path, others: dict[str, Any]) -> None:
    params = [SamplingParams(temperature=t, seed=5, max_tokens=OUT, ignore_eos=True) for t in (0.0, 0.0, 1.0)]
    prompts = prompts_of(checkpoint)[-3:]
    whole, _ = run(checkpoint, "ascend950", params, prompts)
    other, _ = run(checkpoint, "ascend950", params, prompts, **others)
    for a, b in zip(whole, other, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids, f"seed {SEED}"


def test_the_original_engines_variable_changes_the_plan_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    _, named = run(checkpoint, "ascend950", params, [[1, 2, 3]])
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "ascend")
    _, legacy = run(checkpoint, None, params, [[1, 2, 3]])
    assert legacy.choices == named.choices
    assert legacy.accelerator == "ascend950"


def test_without_a_device_the_backend_says_what_is_missing(checkpoint: Path) -> None:
    if Path("/dev/davinci0").exists():
        pytest.skip("this machine has an NPU")
    with pytest.raises(DeviceError, match=r"accelerator='ascend950': no device file /dev/davinci0; check: ls /dev/"):
        LLM(checkpoint, accelerator="ascend950")


@pytest.mark.slow
def test_the_engines_tests_pass_on_its_plan(tmp_path: Path) -> None:
    """The emulated backend as an installed one: metadata alone, its module is in the tests' folder."""
    metadata = tmp_path / "ascend_emulated-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend-emulated\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[deepinfer.plugins.v1]\nascend_emulated = ascend950.emulated_backend\n")
    assert run_engine_tests("ascend950", tmp_path) > 300
