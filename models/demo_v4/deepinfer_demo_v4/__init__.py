"""The demo model's files, what it has not read, and how it was made (:mod:`deepinfer_demo_v4.recipe`)."""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""config.json, tokenizer.json and the weights: what ``--model demo-v4`` opens."""
