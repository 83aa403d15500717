"""From an opened checkpoint to its tokenizer."""

from __future__ import annotations

from pathlib import Path

from deepinfer_core.checkpoint import Checkpoint

from .gguf import load_gguf
from .hugging_face import load_directory
from .tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer of ``checkpoint``; None when it carries none.

    Raises CheckpointError for damaged files and for kinds that are not read.
    """
    source = checkpoint.tokenizer_source
    if isinstance(source, Path):
        return load_directory(source, checkpoint.config, checkpoint.generation_config)
    return load_gguf(source)
