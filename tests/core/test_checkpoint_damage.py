"""A file that is a pointer of Git LFS, as a clone without it leaves, is told from one that is damaged."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from deepinfer_core.api import CheckpointError
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.checkpoint.damage import remedy
from deepinfer_core.tokenizer import load_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5e' * 32}\nsize 1234567\n"
CLONE = Path(str(files("deepinfer_demo_v4"))) / "checkpoint"


def read(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    load_tokenizer(checkpoint)
    for name in checkpoint.weights.names():
        checkpoint.weights.describe(name)


@pytest.mark.parametrize(("text", "says"), [(POINTER, "git lfs pull"), (POINTER[9:], "damaged or was cut")])
@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json", "config.json"]
)
def test_a_file_of_a_clone(tmp_path: Path, name: str, text: str, says: str) -> None:
    for file in CLONE.iterdir():
        if file.name == name:
            (tmp_path / name).write_text(text)
        else:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match=rf"{name}: .*{says}"):
        read(tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.gguf: not a whole GGUF file .*git lfs pull"):
        read(path)


def test_what_cannot_be_opened_at_all(tmp_path: Path) -> None:
    assert [remedy(path) for path in (tmp_path, tmp_path / "gone")] == ["it is damaged or was cut, fetch it again"] * 2
