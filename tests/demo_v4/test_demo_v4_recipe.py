"""Corpus, vocabulary, start weights, files: what the recipe says it does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.held_out import held_out_files, held_out_texts
from deepinfer_demo_v4.recipe import checkpoint, corpus, evaluate, vocabulary
from deepinfer_demo_v4.recipe.corpus import Document
from deepinfer_demo_v4.recipe.shape import CONFIG, Shape
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.models.deepseek_v4.config import V4Config
from deepinfer_core.models.deepseek_v4.tensors import main_tensors

from .support import SMALL, random_weights


def test_sizes_are_within_bounds() -> None:
    stored = [tensor for file in CHECKPOINT.glob("*.safetensors") for tensor in load_file(file).values()]
    assert sum(t.numel() for t in stored if t.is_floating_point()) == 11_467_193 + 4 * 12
    assert max(file.stat().st_size for file in CHECKPOINT.glob("*.safetensors")) < 12e6
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 25e6


def test_names_and_shapes_are_the_released_ones() -> None:
    """Of the trained files, and of a model as it starts; float32 where the released checkpoint keeps it."""
    with open_checkpoint("demo-v4") as opened:
        found = {name: opened.weights.describe(name) for name in opened.weights.names()}
    wanted = dict(main_tensors(V4Config.read(CONFIG)))
    assert {name: tuple(spec.shape) for name, spec in found.items()} == wanted
    wide = {name.rsplit(".", 1)[-1] for name, spec in found.items() if spec.dtype == "float32"}
    layer = {f"hc_{part}_{what}" for part in ("attn", "ffn") for what in ("fn", "base", "scale")}
    assert wide == layer | {"hc_head_fn", "hc_head_base", "hc_head_scale", "attn_sink", "ape", "bias"}
    assert {spec.dtype for name, spec in found.items() if name.endswith("weight")} == {"bfloat16"}
    started = checkpoint.released(checkpoint.initial(Shape.read(CONFIG), np.ones(4096, np.int64)))
    assert {name: tuple(tensor.shape) for name, tensor in started.items()} == wanted


def test_every_kind_of_layer_is_there() -> None:
    config = V4Config.read(json.loads((CHECKPOINT / "config.json").read_text()))
    assert set(config.kinds) == {"window", "csa", "hca"}
    assert set(config.hashed) == {True, False}
    assert json.loads((CHECKPOINT / "config.json").read_text()) == CONFIG


def test_saved_weights_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 40_000)
    weights = random_weights(Shape.read(SMALL), 5)
    checkpoint.save(weights, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {n: f.name for f in files for n in load_file(f)} == index
    found = checkpoint.load(tmp_path)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        rounded = tensor if checkpoint.kept_wide(name) or not tensor.is_floating_point() else tensor.bfloat16().float()
        assert torch.equal(found[name], rounded), name


def test_hash_tables_share_the_text_out() -> None:
    shape = Shape.read(CONFIG)
    rng = np.random.default_rng(1)
    counts = (1e6 / np.arange(1, shape.vocab + 1)).astype(np.int64)
    rng.shuffle(counts)
    tables = [table.numpy() for table in checkpoint.hash_tables(shape, counts, 0)]
    assert not np.array_equal(*tables)
    for table in tables:
        assert all(len(set(row)) == shape.top_k for row in table.tolist())
        load = np.bincount(table.flatten(), np.repeat(counts, shape.top_k), shape.experts)
        assert load.max() < 1.05 * load.mean()
        assert len(np.unique(table, axis=0)) > 100
    again = checkpoint.hash_tables(shape, counts, 0)
    assert np.array_equal(again[1].numpy(), tables[1])


def test_what_is_held_out_hangs_on_the_name_alone() -> None:
    files = held_out_files()
    assert len(files) == 85
    assert sum(file.bytes for file in files) == 1_344_077
    assert all(Document(file.name, "").held_out for file in files)
    names = [f"stdlib/{module}.py" for module in ("argparse", "json/decoder", "glob", "csv", "queue", "shutil")]
    assert [n for n in names if Document(n, "").held_out] == ["stdlib/glob.py", "stdlib/csv.py"]
    assert not Document("numpy/glob.py", "").held_out
    assert set(held_out_texts()) <= {file.name for file in files}
    assert "stdlib/glob.py" in held_out_texts()


def test_documents_are_filtered_and_unique(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    text = "def add(a, b):\n    return a + b\n" * 10
    for name in ("a.py", "sub/b.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "c.py").write_text("x = 1\r\n" + text)
    (tmp_path / "numbers.py").write_text("1234567890, " * 50)
    (tmp_path / "short.py").write_text("pass\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 100)
    (tmp_path / "greek.py").write_text("# λόγος\n" * 100)
    (tmp_path / "large.py").write_text(text * 2000)
    found = list(corpus.unique(corpus._of("source", tmp_path, ".py", ("nothing",))))
    assert [d.name for d in found] == ["source/a.py", "source/c.py"]
    assert "\r" not in found[1].text


def test_streams_come_back(tmp_path: Path) -> None:
    assert corpus.write_stream(tmp_path / "s.xz", [[5, 4095], [7]]) == 7
    stream = corpus.read_stream(tmp_path / "s.xz")
    assert stream.tolist() == [0, 5, 4095, 1, 0, 7, 1]
    assert [t.tolist() for t in evaluate.texts(stream)] == [[0, 5, 4095], [0, 7]]


def test_the_vocabulary_loses_nothing() -> None:
    text = "class A:\n\n    def f(self, x):  # é λ 東\n\treturn  x[1:-1]\r\n" * 3 + "12345 * 3.5e10\n\n\n"
    trained = vocabulary.train_tokenizer([text * 20, "words and more words " * 50], 400)
    for tokenizer in (trained, Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))):
        ids = tokenizer.encode(text).ids
        assert ids[0] == vocabulary.BOS_ID
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_to_id(vocabulary.EOS) == vocabulary.EOS_ID
    assert any(token.startswith("Ċ") and token.endswith("ĠĠĠ") for token in trained.get_vocab())


def test_bytes_of_tokens_are_bytes_of_text() -> None:
    lengths = evaluate.byte_lengths(CHECKPOINT / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = held_out_texts()["stdlib/csv.py"] + "é λ 東"
    assert int(lengths[tokenizer.encode(text).ids].sum()) == len(text.encode())


@pytest.mark.parametrize("length", [2, 1024, 1025, 1536, 3000])
def test_windows_predict_every_token_once(length: int) -> None:
    stream = np.concatenate(([0], np.arange(2, length + 1), [1])).astype(np.int64)
    found = [t for tokens, first in evaluate.windows(stream) for t in tokens[first:].tolist()]
    assert found == list(range(2, length + 1))
    assert all(first in (1, 512) and len(tokens) <= 1024 for tokens, first in evaluate.windows(stream))
