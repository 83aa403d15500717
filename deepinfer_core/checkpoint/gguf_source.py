"""Weights in a GGUF file, under Hugging Face names and in Hugging Face row order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from deepinfer_core.api import CheckpointError, TensorInfo

from .gguf_config import gguf_architecture
from .gguf_file import GGUFFile
from .gguf_names import half_split_rows, hugging_face_name

if TYPE_CHECKING:
    import torch
    from gguf import ReaderTensor

# Types that torch has itself; all others are packed blocks.
_PLAIN: Mapping[GGMLQuantizationType, str] = {
    GGMLQuantizationType.F64: "float64",
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GGUFSource:
    """The weights of one GGUF file; packed types become float32 when they are loaded."""

    def __init__(self, file: GGUFFile) -> None:
        """Raises CheckpointError if the file holds a tensor that has no Hugging Face name: it would be ignored."""
        self._path = file.path
        self._tensors: dict[str, ReaderTensor] = {}
        for name, tensor in file.tensors.items():
            known = hugging_face_name(name)
            if known is None:
                raise CheckpointError(f"{file.path}: tensor {name!r} is not known; use the checkpoint's safetensors")
            self._tensors[known] = tensor
        self._interleaved_heads: dict[str, int] = {}
        architecture = gguf_architecture(file)
        if architecture == "llama":
            heads = int(file.metadata.require("llama.attention.head_count"))
            self._interleaved_heads = {
                ".self_attn.q_proj.weight": heads,
                ".self_attn.k_proj.weight": int(file.metadata.get("llama.attention.head_count_kv", heads)),
            }
        self._closed = False

    def names(self) -> Iterable[str]:
        """Tensor names, in the order of the file."""
        return tuple(self._tensors)

    def describe(self, name: str) -> TensorInfo:
        """Stored shape in Hugging Face order; dtype is torch's or ``"gguf:<type>"``."""
        tensor = self._tensor(name)
        dtype = _PLAIN.get(tensor.tensor_type, f"gguf:{tensor.tensor_type.name.lower()}")
        return TensorInfo(shape=_shape(tensor), dtype=dtype, file=str(self._path), num_bytes=int(tensor.n_bytes))

    def load(self, name: str) -> torch.Tensor:
        """A tensor of its own memory: packed types as float32, others in their stored dtype."""
        import torch

        tensor = self._open_tensor(name)
        data = self._rows(name, tensor.data)
        if tensor.tensor_type == GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(data)).view(torch.bfloat16)
        if tensor.tensor_type in _PLAIN:
            return torch.from_numpy(np.array(data))
        try:
            values = dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be dequantised ({error})") from error
        return torch.from_numpy(values)

    def close(self) -> None:
        """Refuse further loads. The file stays mapped while this object lives."""
        self._closed = True

    def _rows(self, name: str, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for suffix, heads in self._interleaved_heads.items():
            if name.endswith(suffix):
                if len(data) % (2 * heads):
                    raise CheckpointError(f"{self._path}: tensor {name!r}: {len(data)} rows do not fit {heads} heads")
                return data[half_split_rows(len(data), heads)]
        return data

    def _open_tensor(self, name: str) -> ReaderTensor:
        if self._closed:
            raise CheckpointError(f"{self._path}: the checkpoint was closed; load tensors before closing it")
        return self._tensor(name)

    def _tensor(self, name: str) -> ReaderTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self._path}: the checkpoint has no tensor {name!r}") from None


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))
