"""Checkpoints on disk: safetensors directories and GGUF files, opened without reading their weights."""

from .check import check_tensors
from .gguf_file import GGUFMetadata
from .inspect import CheckpointSummary, DtypeUsage, summarise
from .opening import Checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointSummary",
    "DtypeUsage",
    "GGUFMetadata",
    "check_tensors",
    "open_checkpoint",
    "summarise",
]
