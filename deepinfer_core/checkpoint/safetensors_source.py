"""Weights in safetensors files, memory-mapped, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from deepinfer_core.api import CheckpointError, TensorInfo

from .damage import remedy
from .json_files import read_json_object

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# safetensors' dtype -> torch's name and bits per stored element.
_DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
}


class SafetensorsSource:
    """A :class:`~deepinfer_core.api.WeightSource` over one or more safetensors files.

    Loaded tensors map the file privately: they cost no memory until touched, writing to them never changes the
    file, and they stay valid after :meth:`close`.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        """``files``: tensor name -> file that holds it."""
        self._files = dict(files)
        self._headers: dict[Path, dict[str, TensorInfo]] = {}
        self._handles: dict[Path, Any] = {}
        self._closed = False

    def names(self) -> Iterable[str]:
        """Tensor names, in the order of the index or of the files."""
        return tuple(self._files)

    def describe(self, name: str) -> TensorInfo:
        """Stored shape, dtype and file; reads the file's header only."""
        file = self._file_of(name)
        if file not in self._headers:
            self._headers[file] = read_header(file)
        info = self._headers[file].get(name)
        if info is None:
            raise CheckpointError(f"{file}: tensor {name!r} is missing, although {INDEX_NAME} says it is there")
        return info

    def load(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, memory-mapped."""
        if self._closed:
            raise CheckpointError(f"{self._file_of(name)}: the checkpoint was closed; load tensors before closing it")
        file = self._file_of(name)
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} cannot be read ({error})") from error
        return tensor

    def close(self) -> None:
        """Let go of the files."""
        self._closed = True
        self._handles.clear()

    def _file_of(self, name: str) -> Path:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}") from None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of ``file`` without reading data. Raises CheckpointError for a damaged or truncated file."""
    try:
        # The "np" framework reads the header without importing torch.
        with safe_open(file, framework="np") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
            return {name: _info(file, name, part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error}); {remedy(file)}") from error


def _info(file: Path, name: str, shape: Sequence[int], stored: str) -> TensorInfo:
    if stored not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {stored}, which is none of {', '.join(_DTYPES)}")
    dtype, bits = _DTYPES[stored]
    num_bytes = prod(shape) * bits // 8
    if bits == 4:  # torch counts pairs, the file counts elements
        shape = [*shape[:-1], shape[-1] // 2]
    return TensorInfo(shape=tuple(shape), dtype=dtype, file=str(file), num_bytes=num_bytes)


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The weights of ``directory``: by the index, else ``model.safetensors``, else every ``*.safetensors``."""
    index = directory / INDEX_NAME
    if index.is_file():
        return SafetensorsSource(_files_of_index(index))
    single = directory / SINGLE_NAME
    return SafetensorsSource(_files_of_headers([single] if single.is_file() else find_safetensors(directory)))


def find_safetensors(directory: Path) -> list[Path]:
    """Every ``*.safetensors`` in ``directory``, sorted."""
    return sorted(directory.glob("*.safetensors"))


def _files_of_index(index: Path) -> dict[str, Path]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: 'weight_map' names {shard!r}; shards must lie beside the index")
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index.parent / shard}: missing, but {index.name} says it holds weights")
    return {name: index.parent / shard for name, shard in weight_map.items()}


def _files_of_headers(files: Sequence[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        for name in read_header(file):
            if name in found:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is also in {found[name].name}; remove one file or add {INDEX_NAME}"
                )
            found[name] = file
    return found
