"""The demo model's files, and how they were made (:mod:`deepinfer_demo_v4.recipe`)."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""config.json, tokenizer.json and the weights: what ``--model demo-v4`` opens."""

HELD_OUT = Path(__file__).parent / "held_out"
"""Texts that took no part in training: ``files.json`` names all of them, a few are here whole."""
