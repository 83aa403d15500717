"""``deepinfer warmup``: what it runs reaches every operator, and what it says where there is no GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from deepinfer_nvidia_sm100 import warmup
from gpu_support import ON_GPU
from test_nvidia_engine import BACKEND, dense, plugin_paths

from deepinfer_core import LLM
from deepinfer_core.api import Choice, ConfigError, DeviceError
from deepinfer_core.cli.command_host import ProgramHost


class Watched:
    """Counts calls of what does an operator's work."""

    def __init__(self, slot: str, op: Any, calls: Counter[str]) -> None:
        self._slot, self._op, self._calls = slot, op, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._op, name)
        if name not in ("run", "add"):
            return found

        def counted(*arguments: Any, **named: Any) -> Any:
            self._calls[self._slot] += 1
            return found(*arguments, **named)

        return counted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warmup")
    dense("qwen3").float().save_pretrained(path)
    return path


@pytest.mark.slow
def test_every_operator_of_the_plan_is_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(warmup, "LENGTHS", (1, 5, 20))
        monkeypatch.setattr(warmup, "TOGETHER", 2)
        monkeypatch.setattr(warmup, "MANY", 4)
    calls: Counter[str] = Counter()

    def watch(choice: Choice, op: Any) -> Any:
        return Watched(choice.slot, op, calls)

    config = {
        "plugins.paths": plugin_paths(),
        "kv_cache.num_blocks": 65,
        "kv_cache.block_size": 16,
        "scheduling.max_running": 3,
        "logging.progress": False,
        "fallback": "allow",
    }
    host = ProgramHost()
    with LLM(checkpoint, accelerator=BACKEND, dtype="float32", config=config, wrap_op=watch) as llm:
        calls.clear()
        for batch in warmup.batches(host, 64):
            warmup.run(llm, batch)
        slots = {choice.slot for choice in llm.engine.planned.plan.choices}
    layouts = {slot for slot in slots if slot.startswith("kv_layout_")}
    assert slots - layouts == set(calls)
    assert "attention_inputs_full" in calls


def test_prompts_are_no_longer_than_the_model_takes_and_of_tokens_that_it_has() -> None:
    for longest in (64, 300, 4096):
        for _, prompts, params in warmup.batches(ProgramHost(), longest):
            assert len(prompts) == len(params)
            assert all(0 <= token < 16 for prompt in prompts for token in prompt)
            assert all(1 <= len(prompt) <= longest - warmup.NEW_TOKENS for prompt in prompts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_an_error() -> None:
    result = CliRunner().invoke(warmup.warmup, ["demo"], obj=ProgramHost())
    assert isinstance(result.exception, DeviceError)
    assert "no GPU" in str(result.exception)
    assert str(result.exception).endswith("check: nvidia-smi")
    result = CliRunner().invoke(warmup.warmup, ["demo", "--set", "model.dtype"], obj=ProgramHost())
    assert isinstance(result.exception, ConfigError)
    assert "KEY=VALUE" in str(result.exception)


def test_a_value_is_json_or_text() -> None:
    assert warmup.setting("a.b=3") == ("a.b", 3)
    assert warmup.setting("a.b=bfloat16") == ("a.b", "bfloat16")
