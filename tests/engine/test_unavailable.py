"""Settings of features that are not there are refused, and window retention does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys.checkpoints import ToyLLM, open_toy, write_toy

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import CheckpointError, ConfigError, PluginError


def test_a_compiler_of_grammars_that_nobody_has_is_refused(toy_llm: ToyLLM) -> None:
    with pytest.raises(PluginError, match="no loaded plugin has constraint 'acme'"):
        toy_llm("Count", structured_outputs__backend="acme")


@pytest.mark.parametrize(("retention", "cached"), [("full", 8), ("minimal", 0)])
def test_retention_decides_whether_a_passed_prefix_can_be_continued(
    toy_llm: ToyLLM, retention: str, cached: int
) -> None:
    """A window of 4 slides over a prompt of 24; a second prompt shares its first 8 tokens."""
    llm = toy_llm(
        "PrefixHash",
        groups={"full": None, "win": 4},
        kv_cache__window_retention=retention,
        scheduling__max_batch_tokens=16,
    )
    greedy = SamplingParams(temperature=0, max_tokens=2)
    llm.generate([list(range(24))], greedy)
    shared: list[int] = [*range(8), 60, 61, 62]
    (again,) = llm.generate([shared], greedy)
    assert again.metrics.cached_tokens == cached
    cold: Any = toy_llm("PrefixHash", groups={"full": None, "win": 4}, kv_cache__prefix_cache=False)
    assert again.outputs[0].token_ids == cold.generate([shared], greedy)[0].outputs[0].token_ids


def test_a_configuration_of_another_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^config=3: expected a file's name, a mapping of settings, or"):
        LLM("demo", config=3)  # type: ignore[arg-type]


def test_a_tokenizer_that_is_not_there_is_an_error_and_a_file_or_directory_is_taken(tmp_path: Path) -> None:
    model = write_toy(tmp_path / "model", "Count", vocab_size=320)
    other = write_toy(tmp_path / "other", "Count", tokenizer=True)
    for path in (other, other / "tokenizer.json"):
        with open_toy(model, model__tokenizer=str(path)) as llm:
            (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=1))
        assert output.prompt_token_ids == [ord("a")]
    for wrong in (tmp_path / "none", tmp_path, other / "config.json"):
        said = rf"^model\.tokenizer='{wrong}': expected tokenizer\.json, or a directory"
        with pytest.raises(ConfigError, match=said):
            open_toy(model, model__tokenizer=str(wrong))


def test_an_architecture_that_nobody_runs_is_told_what_there_is(tmp_path: Path) -> None:
    directory = write_toy(tmp_path, "Count", architectures=["ToyCuont"])
    said = r"'ToyCuont'\]: no loaded plugin runs it; did you mean 'ToyCount'\? Known: "
    with pytest.raises(CheckpointError, match=said):
        open_toy(directory)
