"""Engines over toy models, with the plugin."""

from __future__ import annotations

from typing import Any

from toys.checkpoints import ToyLLM

from deepinfer_core import LLM, SamplingParams

LIBRARIES = ("llguidance", "xgrammar")


def grammar_llm(toy_llm: ToyLLM, library: str = "routed", kind: str = "Flat", **settings: Any) -> LLM:
    backend = f"structured_output:{library}"
    return toy_llm(kind, **{"tokenizer": True, "structured_outputs__backend": backend, **settings})


def constrained(max_tokens: int = 60, **arguments: Any) -> SamplingParams:
    """``regex=...``, ``json=...`` and so on, beside sampling parameters."""
    kinds = ("json", "json_object", "regex", "ebnf", "choice", "structural_tags")
    ((kind, value),) = ((k, v) for k, v in arguments.items() if k in kinds)
    rest = {name: v for name, v in arguments.items() if name != kind}
    return SamplingParams(max_tokens=max_tokens, structured_outputs={kind: value}, **rest)
