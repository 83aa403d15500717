"""What the model is for: recognisable Python, and prose that it predicts well."""

from __future__ import annotations

import ast

import numpy as np
import pytest
import torch
from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.held_out import held_out_texts
from deepinfer_demo_v4.recipe.evaluate import bits_per_byte, byte_lengths
from tokenizers import Tokenizer

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli import main

from .support import trained

PROMPT = "def read_config(path):"


def test_the_command_writes_python(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", "demo-v4", "--temperature", "0", "--max-tokens", "60", "--prompt", PROMPT]
    assert main(arguments) == 0
    first = (PROMPT + capsys.readouterr().out).split("\n\n\n")[0]
    (function,) = ast.parse(first).body
    assert isinstance(function, ast.FunctionDef)
    assert ast.get_docstring(function)
    assert any(isinstance(node, ast.Return) for node in ast.walk(function))


def test_most_samples_are_functions() -> None:
    prompts = ["def read_config(path):", "def is_empty(self):", "def parse_header(line):", "def close(self):"]
    params = SamplingParams(temperature=0.5, max_tokens=120, seed=1)
    with LLM("demo-v4", logging={"progress": False}) as llm:
        outputs = llm.generate(prompts, params)
    parsed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        lines = (prompt + output.outputs[0].text).split("\n")
        # The last line may be cut off; a docstring may not have ended.
        for end in range(len(lines) - 1, 1, -1):
            try:
                body = ast.parse("\n".join(lines[:end])).body
            except SyntaxError:
                continue
            parsed += isinstance(body[0], ast.FunctionDef)
            break
    assert parsed >= 3


def test_held_out_text_is_predicted_well() -> None:
    """Bits per byte of some files; the n-gram model of the card takes 1.43 over all."""
    weights, shape = trained()
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = held_out_texts()
    names = ["stdlib/glob.py", "stdlib/copyreg.py", "stdlib/asyncio/protocols.py", "stdlib/mimetypes.py"]
    stream = np.array([i for name in names for i in (*tokenizer.encode(texts[name]).ids[:1000], 1)])
    with torch.no_grad():
        found = bits_per_byte(weights, shape, stream, byte_lengths(CHECKPOINT / "tokenizer.json"))
    assert found["held_out_bits_per_byte"] < 1.1
