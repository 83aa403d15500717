"""Memory that runs out while weights and caches are placed, while steps are recorded, and in a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_decode_graphs import CONFIG
from toys import recording_device
from toys.tiny_qwen3 import write_tiny_qwen3

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, DeviceError
from deepinfer_core.engine import assemble

FULL = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``room(record=r, replay=p)``: what a device that records graphs has memory for, in rows."""
    plain, again = recording_device.RecordingDevice.capture, recording_device.Again.replay
    limit = {"record": 10**6, "replay": 10**6}

    def capture(self: Any, fn: Callable[[], Any]) -> Any:
        made = plain(self, fn)
        if len(made._result) > limit["record"]:
            raise RuntimeError(FULL)
        return made

    def replay(self: Any) -> Any:
        if len(self._result) > limit["replay"]:
            raise RuntimeError(FULL)
        return again(self)

    monkeypatch.setattr(recording_device.RecordingDevice, "capture", capture)
    monkeypatch.setattr(recording_device.Again, "replay", replay)
    recording_device.REPLAYS.clear()
    return limit.update


PROMPTS = [[1 + (7 * n + i) % 60 for i in range(1 + 3 * n % 7)] for n in range(11)]
PARAMS = [SamplingParams(temperature=0, max_tokens=3 + 2 * n, ignore_eos=True) for n in range(11)]


def opened(checkpoint: Path, **settings: Any) -> LLM:
    config = CONFIG | {name.replace("__", "."): value for name, value in settings.items()}
    return LLM(checkpoint, accelerator="recording", dtype="float32", config=config)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    assert not any(output.error for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("most", [8, 1])
def test_steps_that_cannot_be_recorded_run_operator_by_operator(
    checkpoint: Path, room: Callable[..., None], most: int
) -> None:
    with opened(checkpoint, scheduling__decode_graphs=False) as llm:
        expected = tokens(llm)
    room(record=most)
    with opened(checkpoint) as llm:
        assert llm.explain()["facts"]["decode_graphs"].startswith(f"recorded up to {most} rows: the memory")
        assert tokens(llm) == expected
    assert recording_device.REPLAYS
    assert max(recording_device.REPLAYS) == most


def test_no_room_to_record_anything(checkpoint: Path, room: Callable[..., None]) -> None:
    room(record=0)
    with opened(checkpoint) as llm:
        assert llm.explain()["facts"]["decode_graphs"].startswith("operator by operator: the memory had no room")
        tokens(llm)
    assert not recording_device.REPLAYS
    with pytest.raises(ConfigError, match=r"decode_graphs=true: the memory had no room; lower kv_cache"):
        opened(checkpoint, scheduling__decode_graphs=True)


def test_another_error_while_recording_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Any, fn: Callable[[], Any]) -> Any:
        raise RuntimeError("a broken operator")

    monkeypatch.setattr(recording_device.RecordingDevice, "capture", capture)
    with pytest.raises(RuntimeError, match="a broken operator"):
        opened(checkpoint)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_replay_without_room_is_tried_with_fewer_rows(
    checkpoint: Path, room: Callable[..., None], ahead: bool
) -> None:
    with opened(checkpoint, scheduling__decode_graphs=False) as llm:
        expected = tokens(llm)
    room(replay=4)
    with opened(checkpoint, scheduling__async_scheduling=ahead) as llm:
        assert tokens(llm) == expected
        assert llm.engine.core.planner.budget <= 4
    assert 1 <= max(recording_device.REPLAYS) <= 4


def test_weights_and_caches_that_do_not_fit_are_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise RuntimeError(FULL)

    with monkeypatch.context() as patched:
        patched.setattr(assemble, "_load_model", no_room)
        with pytest.raises(DeviceError, match=r"recording: out of memory while the engine starts.*smaller model"):
            opened(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr(recording_device, "build", no_room)
        with pytest.raises(DeviceError, match=r"recording: out of memory while the engine starts"):
            opened(checkpoint)
    with monkeypatch.context() as patched:
        patched.setattr("torch.zeros", no_room)
        with pytest.raises(ConfigError, match=r"kv_cache: 120 blocks take .* lower kv_cache.num_blocks"):
            opened(checkpoint)
