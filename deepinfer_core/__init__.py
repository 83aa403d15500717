"""DeepInfer: an LLM inference engine whose core is a plugin framework.

>>> from deepinfer_core import LLM, SamplingParams
>>> with LLM("demo") as llm:
...     llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))

Public names are imported when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import EngineConfig, load_config
    from .engine.async_llm import AsyncLLM
    from .engine.llm import LLM
    from .engine.outputs import (
        CompletionOutput,
        Logprob,
        RequestError,
        RequestMetrics,
        RequestOutput,
        StreamDelta,
    )
    from .engine.sampling_params import SamplingParams

_WHERE = {
    "AsyncLLM": "engine.async_llm",
    "LLM": "engine.llm",
    "SamplingParams": "engine.sampling_params",
    "CompletionOutput": "engine.outputs",
    "Logprob": "engine.outputs",
    "RequestError": "engine.outputs",
    "RequestMetrics": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "StreamDelta": "engine.outputs",
    "EngineConfig": "config",
    "load_config": "config",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "__version__",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
