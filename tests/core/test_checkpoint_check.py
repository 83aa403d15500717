"""check_tensors and summarise: answers from headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from checkpoint_support import tiny_model, weights_of, write_directory, write_gguf, write_json
from gguf import GGMLQuantizationType as Q

from deepinfer_core.api import CheckpointError, TensorInfo, TensorSpec
from deepinfer_core.checkpoint import DtypeUsage, check_tensors, open_checkpoint, summarise


class Described:
    """A weight source whose tensors cannot be loaded."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def names(self) -> Iterable[str]:
        return self.shapes

    def describe(self, name: str) -> TensorInfo:
        return TensorInfo(shape=self.shapes[name], dtype="float32", file="weights.safetensors", num_bytes=0)

    def load(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was loaded")


def test_fitting_checkpoint_passes() -> None:
    check_tensors(Described({"a": (2, 3), "extra": (1,)}), {"a": TensorSpec(shape=(2, 3))})


def test_missing_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"1 tensor does not fit the model:\n  tensor 'b': missing.*\[4\]$"):
        check_tensors(Described({}), {"b": TensorSpec(shape=(4,))})


def test_wrong_shape_names_file_found_and_expected() -> None:
    with pytest.raises(
        CheckpointError, match=r"weights\.safetensors: tensor 'a': found shape \[3, 2\], expected \[2, 3"
    ):
        check_tensors(Described({"a": (3, 2)}), {"a": TensorSpec(shape=(2, 3))})


def test_optional_tensor_may_be_missing() -> None:
    check_tensors(Described({}), {"b": TensorSpec(shape=(4,), optional=True)})


def test_optional_tensor_of_another_shape() -> None:
    with pytest.raises(CheckpointError, match=r"found shape \[5\], expected \[4\]"):
        check_tensors(Described({"b": (5,)}), {"b": TensorSpec(shape=(4,), optional=True)})


def test_everything_in_one_error() -> None:
    expected = {"a": TensorSpec(shape=(2,)), "b": TensorSpec(shape=(2,)), "c": TensorSpec(shape=(2,))}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(Described({"a": (1,), "b": (2,)}), expected)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 tensors do not fit the model:"
    assert [("'a'" in line, "'c'" in line) for line in lines[1:]] == [(True, False), (False, True)]


@pytest.mark.parametrize(("wrong", "last"), [(10, "tensor 't9'"), (11, "and 1 more"), (25, "and 15 more")])
def test_at_most_ten_are_listed(wrong: int, last: str) -> None:
    expected = {f"t{i}": TensorSpec(shape=(1,)) for i in range(wrong)}
    with pytest.raises(CheckpointError) as caught:
        check_tensors(Described({}), expected)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + min(wrong, 11)
    assert last in lines[-1]


def test_summary_of_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(1)}
    write_directory(tmp_path, {"model.safetensors": tensors})
    summary = summarise(open_checkpoint(tmp_path))
    assert (summary.architecture, summary.format) == ("LlamaForCausalLM", "safetensors")
    assert (summary.num_parameters, summary.num_bytes) == (12, 38)
    assert summary.dtypes == {
        "float32": DtypeUsage(tensors=2, num_bytes=28),
        "bfloat16": DtypeUsage(tensors=1, num_bytes=10),
    }
    assert list(summary.dtypes) == ["float32", "bfloat16"]


def test_summary_of_gguf(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights_of(model), matrices=Q.Q8_0)
    summary = summarise(open_checkpoint(path))
    assert summary.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert set(summary.dtypes) == {"gguf:q8_0", "float32"}
    assert summary.dtypes["gguf:q8_0"].tensors == 15  # seven matrices in each of two layers, and the head


def test_summary_without_architectures(tmp_path: Path) -> None:
    write_directory(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}})
    write_json(tmp_path / "config.json", {})
    assert summarise(open_checkpoint(tmp_path)).architecture is None
