"""From what the user calls a model to an opened checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import attrs

from deepinfer_core.api import CheckpointError, WeightSource

from .gguf_config import config_from_gguf
from .gguf_file import GGUFFile, GGUFMetadata
from .gguf_source import GGUFSource
from .json_files import read_json_object, read_optional_json_object
from .named import NAMED, find_installed, find_packaged, names
from .safetensors_source import INDEX_NAME, find_safetensors, open_safetensors


@attrs.frozen(kw_only=True)
class Checkpoint:
    """An opened checkpoint. Use as a context manager, or call :meth:`close`.

    Attributes:
        path: the directory, or the GGUF file.
        format: how the weights are stored.
        config: config.json, or its equivalent derived from GGUF metadata.
        generation_config: generation_config.json, ``{}`` when there is none.
        weights: tensors under Hugging Face names.
        tokenizer_source: the directory with tokenizer files, or the GGUF metadata. Nothing of it is read yet.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    config: Mapping[str, Any] = attrs.field(repr=False)
    generation_config: Mapping[str, Any] = attrs.field(repr=False)
    weights: WeightSource = attrs.field(repr=False)
    tokenizer_source: Path | GGUFMetadata = attrs.field(repr=False)
    _close: Callable[[], None] = attrs.field(repr=False)

    def close(self) -> None:
        """Let go of the files. Tensors already loaded stay valid; loading more raises CheckpointError."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Args:
        model: a directory with config.json and safetensors files (one, sharded with an index, or any), a directory
            that holds one GGUF file, a GGUF file, or a name from ``checkpoint.named``: ``"demo"``, or that of an
            installed distribution. A name wins over a directory called the same; write ``./demo`` for the directory.

    Raises:
        CheckpointError: nothing is there, a file is missing or damaged. Names the file and what was expected.
    """
    path = (_named(model) if isinstance(model, str) else None) or Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise CheckpointError(f"{path}: expected a directory or a .gguf file")
    raise CheckpointError(
        f"{path}: no such file or directory; give a local path or one of these names: {', '.join(names())}"
    )


def _named(model: str) -> Path | None:
    """Where the checkpoint of this name lies, None for a path."""
    packaged = NAMED.get(model)
    if packaged:
        return find_packaged(model, packaged)
    return None if "/" in model else find_installed(model)


def _open_directory(directory: Path) -> Checkpoint:
    has_safetensors = (directory / INDEX_NAME).is_file() or bool(find_safetensors(directory))
    gguf_files = sorted(directory.glob("*.gguf"))
    if gguf_files and not has_safetensors:
        if len(gguf_files) > 1:
            names = ", ".join(file.name for file in gguf_files)
            raise CheckpointError(f"{directory}: holds several GGUF files, give the path of one: {names}")
        return _open_gguf(gguf_files[0])
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory}: config.json is missing; expected config.json and *.safetensors, or one .gguf file"
        )
    if not has_safetensors:
        raise CheckpointError(f"{directory}: has config.json but no weights; expected *.safetensors or one .gguf file")
    config = read_json_object(directory / "config.json")
    generation_config = read_optional_json_object(directory / "generation_config.json")
    weights = open_safetensors(directory)
    return Checkpoint(
        path=directory,
        format="safetensors",
        config=config,
        generation_config=generation_config,
        weights=weights,
        tokenizer_source=directory,
        close=weights.close,
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = config_from_gguf(file)
    weights = GGUFSource(file)
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        generation_config={},
        weights=weights,
        tokenizer_source=file.metadata,
        close=weights.close,
    )
