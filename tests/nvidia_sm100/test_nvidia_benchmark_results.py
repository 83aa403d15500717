"""What the GPU's benchmarks find from a run before is of the same model, and whole."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
LARGER = {**SMALL, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``gpu_model.checkpoint``, its weights on the host."""
    monkeypatch.syspath_prepend(FOLDER)
    checkpoint = runpy.run_path(str(FOLDER / "gpu_model.py"))["checkpoint"]
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: draw(*shape))
    return lambda folder, config: checkpoint(folder, {**config, **HEADS})


def layers(folder: Path) -> int:
    """Of the weights, and of what is said of them."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = {name.split(".")[2] for name in file.keys() if ".layers." in name}  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == len(names)
    return len(names)


def test_a_model_of_another_shape_is_made_anew(tmp_path: Path, made: Any) -> None:
    """A quick run leaves one with four layers in the folder where the whole one goes."""
    for config in (SMALL, LARGER, SMALL):
        assert layers(made(tmp_path, config)) == config["num_hidden_layers"]
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    made(tmp_path, SMALL)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_whose_writing_was_interrupted_is_made_anew(
    tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tensors: Any, file: Path, metadata: Any) -> None:
        Path(file).write_bytes(b"half of it")
        raise KeyboardInterrupt

    whole = made.__closure__[0].cell_contents.__globals__
    with monkeypatch.context() as patched:
        patched.setitem(whole, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path, SMALL)
    assert layers(made(tmp_path, SMALL)) == 1


def test_quick_results_are_not_taken_for_those_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    results = runpy.run_path(str(FOLDER / "gpu_common.py"))["Results"]
    results(tmp_path / "gpu_engine.json", True).measure("decode 1", lambda: {"ms": 1.0})
    whole = results(tmp_path / "gpu_engine.json").measure("decode 1", lambda: {"ms": 2.0})
    assert whole == {"ms": 2.0}
    assert results(tmp_path / "gpu_engine.json", True).entries == {"decode 1": {"ms": 1.0}}


@pytest.mark.parametrize(
    ("program", "option"),
    [("gpu_ops", "--only"), ("gpu_engine", "--only"), ("gpu_engine", "--variants"), ("gpu_transformers", "--only")],
)
def test_a_part_that_is_not_there_is_an_error(program: str, option: str) -> None:
    """Not a run that measures nothing and ends well."""
    command = [sys.executable, str(FOLDER / f"{program}.py"), option, "atention"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'atention'" in done.stderr
