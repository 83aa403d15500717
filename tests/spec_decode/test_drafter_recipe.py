"""The recipe of the demo drafters: text as the model writes it, and modules that draft as the engine does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("deepinfer_demo_v4")

from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.attention import Selection
from deepinfer_demo_v4.recipe.drafters.modules import PROGRAMS, Blocks, Kind, block_rows, initial
from deepinfer_demo_v4.recipe.drafters.target_text import write_text
from deepinfer_demo_v4.recipe.forward import forward, layer_weights, logits
from deepinfer_demo_v4.recipe.layers import Weights, linear, rms
from deepinfer_demo_v4.recipe.rotary import angles
from deepinfer_demo_v4.recipe.shape import Shape
from deepinfer_spec_decode.needs import SHIPPED
from safetensors.torch import load_file
from test_demo_models import open_llm

from deepinfer_core import SamplingParams

TAPS = (1, 3, 4, 5)


@pytest.fixture(scope="module")
def target() -> tuple[Weights, Shape]:
    return checkpoint.load(CHECKPOINT), Shape.read(json.loads((CHECKPOINT / "config.json").read_text()))


def test_text_is_what_the_whole_pass_says(target: tuple[Weights, Shape]) -> None:
    """Past the window, past both compressors' blocks: hidden states, taps, and the greedy row's tokens."""
    weights, shape = target
    prompts = torch.randint(3, shape.vocab, (4, 70))
    text = write_text(weights, prompts, 140, TAPS, shape, torch.float32, int(torch.randint(999, ())))
    assert text.temperature.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert (text.ids[:, :70] == prompts).all()
    with torch.no_grad():
        whole = forward(weights, text.ids, shape, Selection(exact=True))
        said = logits(weights, whole.hidden)
    torch.testing.assert_close(text.hidden[:, :-1], whole.hidden[:, :-1], rtol=1e-3, atol=1e-3)
    best = said[3, 69:-1].topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert clear.sum() > 40
    assert (said[3, 69:-1].argmax(-1) == text.ids[3, 70:])[clear].all()
    last = text.streams[:, :-1].mean(2)
    torch.testing.assert_close(text.features[:, :-1, -shape.hidden :], last, rtol=1e-4, atol=1e-4)


def test_longer_text_is_refused(target: tuple[Weights, Shape]) -> None:
    weights, shape = target
    with pytest.raises(ValueError, match="length 300"):
        write_text(weights, torch.ones(1, 4, dtype=torch.int64), 300, TAPS, shape, torch.float32, 0)


def test_modules_draft_as_the_engine_does(target: tuple[Weights, Shape]) -> None:
    """The shipped module over a whole sequence, as in training, gives the drafts that the engine made step by step."""
    weights, shape = target
    made: list[tuple[int, list[int]]] = []
    with open_llm("demo-v4", "dspark", {"drafter": "demo-v4-dspark"}) as llm:
        drafter: Any = llm.engine.core.speculator.drafter  # type: ignore[union-attr]
        inner = drafter.propose

        def propose(step: Any) -> Any:
            proposal = inner(step)
            made.append((int(step.host_anchors[0]), proposal.tokens[0].tolist()))
            return proposal

        drafter.propose = propose
        prompt = "def load(path):\n    with open(path) as file:\n        return"
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40))[0]
    ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    made = [(anchor, tokens) for anchor, tokens in made if anchor < ids.shape[1]]
    text = write_text(weights, ids, ids.shape[1] + 1, TAPS, shape, torch.float32, 0)
    directory = SHIPPED / "demo-v4-dspark"
    config = json.loads((directory / "config.json").read_text())
    assert tuple(config["dspark_target_layer_ids"]) == TAPS
    w = {name: t.float() for name, t in checkpoint.stacked(load_file(directory / "model.safetensors")).items()}
    anchors = torch.tensor([anchor for anchor, _ in made])
    blocks = Blocks(torch.zeros_like(anchors), anchors)
    table, gamma = angles(shape, "window", ids.shape[1] + 8, ids.device), config["dspark_block_size"]
    kind, newest = Kind.of("dspark-3", config["dspark_markov_rank"]), ids[0, anchors]
    ends = weights["embed.weight"], weights["head.weight"]
    with torch.no_grad():
        y = block_rows(kind, w, ends[0], newest, text.features, blocks, gamma, shape, table, PROGRAMS)
        base = linear(rms(y, w["mtp.2.norm.weight"], shape.eps), ends[1])
        previous, drafts = newest, []
        for j in range(5):
            tie = w["mtp.2.markov_head.markov_w1.weight"][previous]
            previous = (base[:, j] + linear(tie, w["mtp.2.markov_head.markov_w2.weight"])).argmax(-1)
            drafts.append(previous)
    same = sum(row.tolist() == tokens for row, (_, tokens) in zip(torch.stack(drafts, 1), made, strict=True))
    assert len(made) > 5
    assert same >= len(made) - 1  # a near-tie may fall the other way


def test_stages_begin_as_the_last_layers(target: tuple[Weights, Shape]) -> None:
    weights, shape = target
    w = initial(Kind.of("dflash-2", 8), weights, shape, TAPS, 0)
    for stage in (0, 1):
        own = layer_weights(weights, 4 + stage)
        assert torch.equal(w[f"mtp.{stage}.attn.wkv.weight"], own["attn.wkv.weight"])
    assert not any("markov" in name or "compressor" in name for name in w)
    with pytest.raises(ValueError, match="eagle"):
        Kind.of("eagle", 8)
