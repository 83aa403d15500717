"""``deepinfer generate`` with the real engine on a tiny checkpoint: it writes, and every mistake is one line."""

from __future__ import annotations

import json
import socket
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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM': expected a list of names"),
        ({"rope_theta": -1}, "config.json: rope_theta=-1: expected a number > 0"),
        ({"rope_scaling": 5}, "config.json: rope_scaling=5: expected an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "config.json: factor=0: expected a number > 0"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id='</s>': expected a token id, or a list of them"),
        ({"eos_token_id": [2, -1]}, "config.json: eos_token_id=[2, -1]: expected a token id"),
        ({"num_hidden_layers": 3}, "9 tensors do not fit the model: tensor 'model.layers.2."),
    ],
)
def test_configuration_that_no_model_has(
    fields: dict[str, object], said: str, refused: Callable[..., str], checkpoint: Path
) -> None:
    edit(checkpoint, **fields)
    assert said in refused(*generate(checkpoint), stdin=IDS)


def test_option_of_sampling_is_not_blamed_on_the_prompts(refused: Callable[..., str], checkpoint: Path) -> None:
    prompt = json.dumps({"prompt_token_ids": [1]})
    said = refused(*generate(checkpoint, "--temperature", "nan"), stdin=prompt)
    assert said == "temperature=nan: expected a finite number >= 0"


def test_file_of_a_grammar_that_is_not_there(refused: Callable[..., str], checkpoint: Path) -> None:
    said = refused(*generate(checkpoint, "--json-schema", "/no/such.json"), stdin=IDS)
    assert "'/no/such.json' cannot be read: No such file or directory" in said


def test_place_for_metrics_without_a_sink(refused: Callable[..., str], checkpoint: Path) -> None:
    """Else a user would wait for numbers that nobody writes."""
    said = refused(*generate(checkpoint, "--set", "plugins.engine.prometheus_port=0"), stdin=IDS)
    assert said.startswith("plugins.engine.prometheus_port = 0: nothing would write there; set logging.metrics")


def test_port_that_another_has(refused: Callable[..., str], checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"plugins.engine.prometheus_port={taken.getsockname()[1]}"
        options = ("--set", port, "--set", "logging.metrics=prometheus")
        assert "Address already in use" in refused(*generate(checkpoint, *options), stdin=IDS)


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
