"""``deepinfer generate`` with the real engine on a tiny checkpoint: it writes, and every mistake is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_checkpoint import VOCAB
from cli_fakes import Run

IDS = json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "temperature": 0})


def generate(checkpoint: Path, *arguments: str) -> tuple[str, ...]:
    return ("generate", "--model", str(checkpoint), "--prompt-file", "-", *arguments)


def edit(checkpoint: Path, **fields: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_token_ids_in_and_out(run: Run, checkpoint: Path) -> None:
    result = run(*generate(checkpoint, "--json"), stdin=IDS)
    assert result.code == 0, result.err
    output = json.loads(result.out)
    # All weights are zero, so all logits are equal: the lowest id wins.
    assert output["outputs"][0]["token_ids"] == [0, 0, 0, 0]
    assert (output["prompt_token_ids"], output["error"]) == ([1, 2, 3], None)


def test_stream_gives_the_same_tokens(run: Run, checkpoint: Path) -> None:
    result = run(*generate(checkpoint, "--json", "--stream"), stdin=IDS)
    deltas = [json.loads(line) for line in result.out.splitlines()]
    assert [token for delta in deltas for token in delta["token_ids"]] == [0, 0, 0, 0]
    assert deltas[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "empty"),
        ([1] * 128, "128"),
        ([VOCAB], str(VOCAB)),
        ([-1], "-1"),
    ],
)
def test_prompt_that_cannot_run(prompt: list[int], said: str, refused: Callable[..., str], checkpoint: Path) -> None:
    assert said in refused(*generate(checkpoint), stdin=json.dumps({"prompt_token_ids": prompt}))


def test_text_without_a_tokenizer(refused: Callable[..., str], checkpoint: Path) -> None:
    for arguments in ((), ("--chat",), ("--chat", "--stream")):
        assert "tokenizer" in refused("generate", "--model", str(checkpoint), "--prompt", "hi", *arguments)


def test_directory_without_configuration(refused: Callable[..., str], checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert "config.json is missing" in refused(*generate(checkpoint), stdin=IDS)


def test_unknown_architecture(refused: Callable[..., str], checkpoint: Path) -> None:
    edit(checkpoint, architectures=["Unheard"])
    assert "Unheard" in refused(*generate(checkpoint), stdin=IDS)


def test_truncated_weights(refused: Callable[..., str], checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(*generate(checkpoint), stdin=IDS)


def test_tensor_of_another_shape(refused: Callable[..., str], checkpoint: Path) -> None:
    edit(checkpoint, intermediate_size=65)
    assert "mlp" in refused(*generate(checkpoint), stdin=IDS)


def test_backend_that_is_not_there(refused: Callable[..., str], checkpoint: Path) -> None:
    assert "nowhere" in refused(*generate(checkpoint, "--accelerator", "nowhere"), stdin=IDS)


def test_variable_of_a_plugin_that_is_not_there(
    refused: Callable[..., str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_ACME__SPEED", "1")
    assert "unknown environment variable DEEPINFER_ACME__SPEED" in refused(*generate(checkpoint), stdin=IDS)
