"""From a configuration to a running engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from deepinfer_core.api import ConfigError
from deepinfer_core.checkpoint import Checkpoint, open_checkpoint
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import WrapOp
from deepinfer_core.tokenizer import Tokenizer, load_tokenizer

from .assemble import Engine, build_engine
from .planning import make_plan
from .progress import loading_bar


def open_engine(
    config: EngineConfig, *, wrap_op: WrapOp | None = None, clock: Callable[[], float] = time.monotonic
) -> Engine:
    """Open the checkpoint, plan, and load. ``config.model.path`` is set.

    Args:
        wrap_op: replaces each operator as the table is made, for measurements.
        clock: seconds, never decreasing; all times of requests and steps are on it.

    Raises:
        DeepInferError: one clear line about what is wrong and how to mend it.
    """
    with open_checkpoint(str(config.model.path)) as checkpoint:
        tokenizer = _tokenizer(config, checkpoint)
        planned = make_plan(config, checkpoint, os.environ)
        with loading_bar(len(planned.spec.tensors), enabled=config.logging.progress) as loaded:
            return build_engine(planned, checkpoint, tokenizer, progress=loaded, wrap_op=wrap_op, clock=clock)


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.model.tokenizer is None:
        return load_tokenizer(checkpoint)
    path = Path(config.model.tokenizer)
    path = path.parent if path.name == "tokenizer.json" else path
    found = load_tokenizer(attrs.evolve(checkpoint, tokenizer_source=path)) if path.is_dir() else None
    if found is None:
        raise ConfigError(
            f"model.tokenizer={config.model.tokenizer!r}: expected tokenizer.json, or a directory that has one; leave "
            "it out for the checkpoint's own"
        )
    return found
