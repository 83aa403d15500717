"""Opening a GGUF file: metadata and tensor table, quickly and with errors that name the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from deepinfer_core.api import CheckpointError

from .damage import remedy

if TYPE_CHECKING:
    from gguf import ReaderTensor

# What the library raises on damaged files: short slices, bad enums, bad UTF-8, duplicate keys.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error)


class _Reader(GGUFReader):
    """The library's reader with arrays parsed in bulk.

    The library makes two numpy views per element, which takes seconds for a vocabulary. Its parts are laid out as
    the library's own, so ``ReaderField.contents`` reads both; should a later release rename the hook, arrays are
    merely parsed slowly again.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        types = [GGUFValueType.ARRAY, item_type]
        if item_type == GGUFValueType.STRING:
            strings, end = self._strings(start, count)
            return end - orig_offs, strings, list(range(count)), types
        scalar = self.gguf_scalar_to_np.get(item_type)
        if scalar is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, scalar, count)
        if len(values) != count:
            raise ValueError(f"array of {count} elements is cut after {len(values)}")
        return 12 + int(values.nbytes), [values], [0], types

    def _strings(self, start: int, count: int) -> tuple[list[memoryview], int]:
        """``count`` length-prefixed strings from byte ``start``, and the byte after them."""
        view: memoryview = self.data.data
        length = struct.Struct("<Q" if self.endianess.name == "LITTLE" else ">Q")
        strings = []
        for _ in range(count):
            (size,) = length.unpack_from(view, start)
            start += 8
            if start + size > len(view):
                raise ValueError("a string runs past the end of the file")
            strings.append(view[start : start + size])
            start += size
        return strings, start


class GGUFMetadata(Mapping[str, Any]):
    """Metadata of a GGUF file as plain Python values, decoded when asked for."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path}: metadata {key!r} is not UTF-8 ({error}); the file is damaged"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def require(self, key: str) -> Any:
        """The value of ``key``; CheckpointError when the file lacks it."""
        if key not in self._fields:
            raise CheckpointError(f"{self.path}: metadata {key!r} is missing; the file was not written completely")
        return self[key]


class GGUFFile:
    """An opened GGUF file.

    Attributes:
        path: the file.
        metadata: key -> value.
        tensors: GGUF tensor name -> the library's record; its ``data`` maps the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = _Reader(path)
        except _DAMAGE as error:
            raise CheckpointError(f"{path}: not a whole GGUF file ({error}); {remedy(path)}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error})") from error
        self.path = path
        self.metadata = GGUFMetadata(path, reader.fields)
        self.tensors: Mapping[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: stored in the other byte order; convert it to this machine's first")
        if int(self.metadata.get("split.count", 1)) > 1:
            raise CheckpointError(f"{path}: one of several split files; merge them into one first")
