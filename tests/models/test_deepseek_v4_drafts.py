"""The draft modules, against transformers' layers with their inputs put in from outside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from v4 import draft_oracle
from v4.draft_oracle import as_drafts, main_streams, rms, stages
from v4.released import pack_all, released_config, unpack_all, write
from v4.support import Stepper, chunk_ends, plan_of, random_model, random_tokens

from deepinfer_core.api import CheckpointError, ConfigError
from deepinfer_core.checkpoint import open_checkpoint
from deepinfer_core.models.deepseek_v4.dspark import DeepseekV4DSpark

SEED, LENGTH, HIDDEN, RANK, BLOCK_SIZE, NOISE = 21, 30, 64, 6, 5, 99
TARGETS = [1, 2, 3]
TOKENS = random_tokens(4, LENGTH + 1)
PLAIN = {
    "hidden_size": 64,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "index_head_dim": 16,
    "moe_intermediate_size": 32,
    "o_lora_rank": 16,
    "q_lora_rank": 24,
    "quantization_config": None,
    "expert_dtype": None,
}
DSPARK = {
    "dspark_block_size": BLOCK_SIZE,
    "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": TARGETS,
    "dspark_markov_rank": RANK,
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    scale = math.sqrt(shape[-1])
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / scale


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal up to float32's rounding of numbers as large as these: random streams run to the hundreds."""
    return float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@attrs.frozen(eq=False)
class Drafts:
    """A checkpoint with draft stages, the two models behind it, and the tensors no layer of theirs has."""

    path: Path
    main: Any
    stage: Any
    extra: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    root = tmp_path_factory.mktemp("mtp")
    main = random_model(SEED)
    stage = stages(SEED + 1, 1, main)
    extra = {f"mtp.0.{n}.weight": normal(HIDDEN, HIDDEN, seed=i) for i, n in enumerate(("e_proj", "h_proj"))}
    extra |= {f"mtp.0.{n}.weight": 1 + normal(HIDDEN, seed=i + 5) for i, n in enumerate(("enorm", "hnorm"))}
    drafts = as_drafts(draft_oracle.released(stage, root / "stage"), 1)
    tensors = draft_oracle.released(main, root / "main") | drafts | extra
    return Drafts(write(root / "whole", tensors, released_config(1, **PLAIN)), main, stage, extra)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    root = tmp_path_factory.mktemp("dspark")
    main = random_model(SEED)
    stage = stages(SEED + 2, 3, main)
    extra = {
        "mtp.0.main_proj.weight": normal(HIDDEN, 3 * HIDDEN, seed=1),
        "mtp.0.main_norm.weight": 1 + normal(HIDDEN, seed=2),
        "mtp.2.markov_head.markov_w1.weight": normal(128, RANK, seed=3),
        "mtp.2.markov_head.markov_w2.weight": normal(128, RANK, seed=4) * 3,
        "mtp.2.confidence_head.proj.weight": normal(1, HIDDEN + RANK, seed=5),
    }
    drafts = as_drafts(draft_oracle.released(stage, root / "stage"), 3)
    tensors = draft_oracle.released(main, root / "main") | drafts | extra
    return Drafts(write(root / "whole", tensors, released_config(3, **PLAIN, **DSPARK)), main, stage, extra)


def run_main(path: Path, taps: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Our main model's final streams and taps over the text."""
    stepper = Stepper(path)
    batch = stepper.batch([(0, TOKENS[:LENGTH], 0)])
    with torch.inference_mode():
        streams, tapped = stepper.model.streams(batch, stepper.model.plan(batch), taps)
    return streams, tapped


def test_streams_and_taps_are_those_of_the_layers(dspark: Drafts) -> None:
    streams, tapped = run_main(dspark.path, TARGETS)
    wanted = main_streams(dspark.main, TOKENS[:LENGTH], [*TARGETS, 3])
    for found, right in zip([*tapped, streams], wanted, strict=True):
        assert same(found, right)


@pytest.mark.parametrize("chunk", [1, 5, LENGTH])
def test_next_token_module(mtp: Drafts, chunk: int) -> None:
    streams = main_streams(mtp.main, TOKENS[:LENGTH], [3])[0]
    wanted = draft_oracle.mtp(mtp.stage, mtp.extra, streams, TOKENS[1:])
    stepper = Stepper(mtp.path, architecture="DeepseekV4MTP")
    rows, start = [], 0
    for end in chunk_ends(LENGTH, chunk):
        batch = stepper.batch([(0, TOKENS[start + 1 : end + 1], start)])
        with torch.inference_mode():
            hidden, own = stepper.model.forward(batch, stepper.model.plan(batch), streams[start:end])
            rows.append(stepper.model.logits(hidden))
        assert own.shape == (end - start, 4, HIDDEN)
        start = end
        stepper.slide(0, start)
    assert torch.allclose(torch.log_softmax(torch.cat(rows), -1), torch.log_softmax(wanted, -1), atol=1e-4)


class Drafter:
    """Our block drafter over two requests."""

    def __init__(self, path: Path) -> None:
        self.stepper = Stepper(path, architecture="DeepseekV4DSpark")
        self.model: DeepseekV4DSpark = self.stepper.model

    def inject(self, taps: list[torch.Tensor], start: int, end: int, request: int = 0) -> None:
        batch = self.stepper.batch([(request, TOKENS[start:end], start)])
        with torch.inference_mode():
            self.model.inject([self.model.keep(tap[start:end]) for tap in taps], batch, self.model.plan(batch))

    def draft(self, *at: tuple[int, int, int]) -> Any:
        """``(request, newest token, its position)`` of each request."""
        parts = []
        for request, newest, position in at:
            parts.append((request, self.model.inputs(torch.tensor([newest]))[0].tolist(), position))
        batch = self.stepper.batch(parts)
        with torch.inference_mode():
            return self.model.draft(batch, self.model.plan(batch))


def expected(dspark: Drafts, taps: list[torch.Tensor], past: int, newest: int) -> tuple[Any, list[int], list[float]]:
    """Logits, tokens and confidence logits of a block, the Markov head written out."""
    x = dspark.extra
    features = torch.cat([tap[:past].mean(1) for tap in taps], -1) @ x["mtp.0.main_proj.weight"].T
    features = rms(features, x["mtp.0.main_norm.weight"])
    block = draft_oracle.dspark(dspark.stage, features, newest, NOISE, BLOCK_SIZE)
    logits, tokens, confidence, previous = block.logits.clone(), [], [], newest
    for j in range(BLOCK_SIZE):
        tie = x["mtp.2.markov_head.markov_w1.weight"][previous]
        logits[j] += x["mtp.2.markov_head.markov_w2.weight"] @ tie
        confidence.append(float(x["mtp.2.confidence_head.proj.weight"][0] @ torch.cat((block.hidden[j], tie))))
        previous = int(logits[j].argmax())
        tokens.append(previous)
    return logits, tokens, confidence


@pytest.mark.parametrize("past", [1, 4, 8, 9, 17, 25])
def test_block_drafter(dspark: Drafts, past: int) -> None:
    """Shorter than the window, as long, longer; features injected in one step or in several."""
    taps = main_streams(dspark.main, TOKENS[:LENGTH], TARGETS)
    logits, tokens, confidence = expected(dspark, taps, past, TOKENS[past])
    for cuts in ([past], chunk_ends(past, 3)):
        drafter, start = Drafter(dspark.path), 0
        for end in cuts:
            drafter.inject(taps, start, end)
            start = end
        found = drafter.draft((0, TOKENS[past], past))
        assert same(found.scores[0], logits)
        assert found.tokens[0].tolist() == tokens
        assert found.confidence[0].tolist() == pytest.approx(confidence, rel=1e-4, abs=0.02)


def test_drafts_do_not_change_with_what_was_drafted_before(dspark: Drafts) -> None:
    """Accepted positions are injected over the rows that drafting left there."""
    taps = main_streams(dspark.main, TOKENS[:LENGTH], TARGETS)
    drafter = Drafter(dspark.path)
    drafter.inject(taps, 0, 10)
    drafter.draft((0, TOKENS[10], 10))
    drafter.inject(taps, 10, 13)
    found = drafter.draft((0, TOKENS[13], 13))
    assert same(found.scores[0], expected(dspark, taps, 13, TOKENS[13])[0])


def test_two_requests_draft_in_one_step(dspark: Drafts) -> None:
    taps = main_streams(dspark.main, TOKENS[:LENGTH], TARGETS)
    drafter = Drafter(dspark.path)
    drafter.inject(taps, 0, 6)
    drafter.inject(taps, 0, 20, request=1)
    found = drafter.draft((0, TOKENS[6], 6), (1, 77, 20))
    assert same(found.scores[0], expected(dspark, taps, 6, TOKENS[6])[0])
    assert same(found.scores[1], expected(dspark, taps, 20, 77)[0])


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_every_draft_tensor_is_read_exactly_once(kind: str, request: pytest.FixtureRequest) -> None:
    drafts: Drafts = request.getfixturevalue(kind)
    read: list[str] = []
    architecture = {"mtp": "DeepseekV4MTP", "dspark": "DeepseekV4DSpark"}[kind]
    planned = plan_of(drafts.path, architecture)
    with open_checkpoint(drafts.path) as checkpoint:
        stored = [name for name in checkpoint.weights.names() if name.startswith("mtp.")]
        Stepper(drafts.path, architecture=architecture, read=read)
    assert sorted(name for name in read if name.startswith("mtp.")) == sorted(stored)
    assert set(planned.spec.tensors) == {*stored, "embed.weight", "head.weight"}
    main: list[str] = []
    Stepper(drafts.path, read=main)
    assert not set(main) & set(stored)
    assert set(stored) < set(plan_of(drafts.path).spec.tensors)


def test_a_draft_tensor_nobody_reads_is_an_error(mtp: Drafts, tmp_path: Path) -> None:
    with open_checkpoint(mtp.path) as checkpoint:
        tensors = {name: checkpoint.weights.load(name).clone() for name in checkpoint.weights.names()}
    path = write(tmp_path, tensors | {"mtp.0.stranger": torch.zeros(1)}, released_config(1, **PLAIN))
    with pytest.raises(CheckpointError, match=r"1 draft tensors of 1 stages were not used: mtp\.0\.stranger"):
        Stepper(path, architecture="DeepseekV4MTP")


def test_a_main_model_without_drafts_has_no_draft_module(mtp: Drafts, dspark: Drafts) -> None:
    with pytest.raises(ConfigError, match=r"kind 'mtp' was asked for, the checkpoint has 3 of kind 'dspark'"):
        plan_of(dspark.path, "DeepseekV4MTP")
    with pytest.raises(ConfigError, match=r"kind 'dspark' was asked for, the checkpoint has 1 of kind 'mtp'"):
        plan_of(mtp.path, "DeepseekV4DSpark")


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_packed_draft_tensors(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Stages stored in FP8 and FP4 are those whose decoded numbers are stored plainly."""
    drafts: Drafts = request.getfixturevalue(kind)
    with open_checkpoint(drafts.path) as checkpoint:
        tensors = {name: checkpoint.weights.load(name).clone() for name in checkpoint.weights.names()}
    config = {**released_config(3, **PLAIN, **DSPARK)} if kind == "dspark" else released_config(1, **PLAIN)
    packed = pack_all(tensors)
    assert packed["mtp.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    left = write(tmp_path / "packed", packed, config)
    right = write(tmp_path / "plain", unpack_all(packed), config)
    if kind == "mtp":
        streams = run_main(right, [])[0]
        results = []
        for path in (left, right):
            stepper = Stepper(path, architecture="DeepseekV4MTP")
            batch = stepper.batch([(0, TOKENS[1:], 0)])
            with torch.inference_mode():
                results.append(stepper.model.forward(batch, stepper.model.plan(batch), streams)[0])
    else:
        taps = run_main(right, TARGETS)[1]
        results = []
        for path in (left, right):
            drafter = Drafter(path)
            drafter.inject(taps, 0, 20)
            results.append(drafter.draft((0, TOKENS[20], 20)).scores)
    assert same(results[0], results[1])
