"""The model against transformers, on models drawn afresh in every run: one-shot, in steps, batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toys.seeds import module_seed
from v4.support import (
    HCA_RATE,
    TOLERANCE,
    Oracle,
    Stepper,
    assert_same,
    chunk_ends,
    oracle,
    plan_of,
    random_model,
    random_tokens,
)

SEED = module_seed(__name__)
LENGTH = 61
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_v4"
checked = {"positions": 0, "near_ties": 0}


class Fixture:
    """A saved random model, transformers' answer for two texts, and ours, loaded once."""

    def __init__(self, path: Path) -> None:
        model = random_model(SEED)
        model.save_pretrained(path)
        self.path = path
        self.first = oracle(model, random_tokens(SEED + 1, LENGTH))
        self.second = oracle(model, random_tokens(SEED + 2, LENGTH))
        for text in (self.first, self.second):
            checked["positions"] += LENGTH
            checked["near_ties"] += len(text.near_ties)

    def stepper(self) -> Stepper:
        return Stepper(self.path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("tiny_v4"))


def told(what: str) -> str:
    return f"{what} (seed {SEED})"


def test_golden_logits() -> None:
    golden = load_file(GOLDEN / "golden.safetensors")
    tokens = golden["input_ids"][0].tolist()
    wanted = Oracle(tokens, torch.log_softmax(golden["logits"][0].double(), -1), frozenset())
    assert_same(Stepper(GOLDEN).step([(0, tokens, 0)]), wanted, "golden")


def test_one_shot(tiny: Fixture) -> None:
    assert_same(tiny.stepper().step([(0, tiny.first.tokens, 0)]), tiny.first, told("one shot"))


def test_with_reference_operators_alone(tiny: Fixture) -> None:
    ops = {request.op: ["reference"] for request in plan_of(tiny.path).spec.ops.values()}
    found = Stepper(tiny.path, ops=ops).run(tiny.first.tokens, chunk_ends(LENGTH, 11))
    assert_same(found, tiny.first, told("reference operators"))


@pytest.mark.parametrize("size", range(1, 18))
def test_every_chunk_size(tiny: Fixture, size: int) -> None:
    """Size 1 is token by token. Most sizes cut windows of 4 and of 16 tokens."""
    found = tiny.stepper().run(tiny.first.tokens, chunk_ends(LENGTH, size))
    assert_same(found, tiny.first, told(f"chunks of {size}"))


def test_uneven_chunks(tiny: Fixture) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(4):
        cuts = sorted({*torch.randint(1, LENGTH, (7,), generator=generator).tolist(), LENGTH})
        assert_same(tiny.stepper().run(tiny.first.tokens, cuts), tiny.first, told(f"cuts {cuts}"))


def test_batched_with_a_stranger_at_another_length(tiny: Fixture) -> None:
    ours, other = tiny.first.tokens, tiny.second.tokens
    stepper = tiny.stepper()
    stepper.step([(1, other[:19], 0)])
    both = stepper.step([(0, ours[:30], 0), (1, other[19:22], 19)])
    assert_same(both[:30], tiny.first, told("with a stranger"), range(30))
    assert_same(both[30:], tiny.second, told("the stranger"), range(19, 22))
    both = stepper.step([(1, other[22:], 22), (0, ours[30:], 30)])
    assert_same(both[LENGTH - 22 :], tiny.first, told("second chunk"), range(30, LENGTH))
    assert_same(both[: LENGTH - 22], tiny.second, told("the stranger's rest"), range(22, LENGTH))


@pytest.mark.parametrize("length", [*range(28, 28 + HCA_RATE), LENGTH])
def test_every_residue_of_the_prompt_then_decode(tiny: Fixture, length: int) -> None:
    """The entry that the last prompt token closes must be visible to that token, and to those after it."""
    stepper = tiny.stepper()
    prompt = stepper.run(tiny.first.tokens[:length], [length])
    assert_same(prompt, tiny.first, told(f"prompt of {length}"), range(length))
    end = min(length + 5, LENGTH)
    for position in range(length, end):
        row = stepper.run(tiny.first.tokens[: position + 1], [position + 1], start=position)
        assert_same(row, tiny.first, told(f"decode at {position} after {length}"), [position])


@pytest.mark.parametrize("depth", range(1, 9))
def test_rejected_rows_leave_nothing_behind(tiny: Fixture, depth: int) -> None:
    """Verify steps of several rows whose last ones are wrong guesses: only the length is rolled back."""
    tokens = tiny.first.tokens
    stepper = tiny.stepper()
    stepper.run(tokens[:21], [21])
    position = 21
    while position + depth < LENGTH:
        kept = (position * 7) % (depth + 1)
        wrong = [(token + 1) % 128 for token in tokens[position + 1 + kept : position + 1 + depth]]
        rows = stepper.step([(0, [*tokens[position : position + 1 + kept], *wrong], position)])
        good = range(position, position + 1 + kept)
        assert_same(rows[: 1 + kept], tiny.first, told(f"depth {depth}, {kept} kept at {position}"), good)
        position += 1 + kept
        stepper.slide(0, position)


@pytest.mark.parametrize("length", [HCA_RATE, 2 * HCA_RATE, 3 * HCA_RATE])
def test_a_fully_cached_prompt_recomputes_its_last_token_without_writing(tiny: Fixture, length: int) -> None:
    stepper = tiny.stepper()
    stepper.step([(0, tiny.first.tokens[:length], 0)])
    before = {name: [{k: t.clone() for k, t in layer.items()} for layer in c] for name, c in stepper.caches.items()}
    row = stepper.step([(0, tiny.first.tokens[length - 1 : length], length - 1)], redirect=True)
    assert_same(row, tiny.first, told(f"full hit of {length}"), [length - 1])
    for name, layers in stepper.caches.items():
        for now, then in zip(layers, before[name], strict=True):
            for key, tensor in now.items():
                assert torch.equal(tensor[1:].nan_to_num(), then[key][1:].nan_to_num()), (name, key)
    rest = stepper.step([(0, tiny.first.tokens[length:], length)])
    assert_same(rest, tiny.first, told("and goes on"), range(length, LENGTH))


def test_a_step_without_rows(tiny: Fixture) -> None:
    assert tiny.stepper().step([]).shape == (0, 128)


def test_rows_of_index_and_main_entries_are_the_same(tiny: Fixture) -> None:
    """Entry j of one belongs to entry j of the other: both groups grow together, whatever the chunks."""
    stepper = tiny.stepper()
    tokens = tiny.first.tokens
    for end in chunk_ends(LENGTH, 7):
        start = (end - 1) // 7 * 7
        stepper.step([(0, tokens[start:end], start)])
        for name, entry in (("csa", "kv"), ("index", "key")):
            table = stepper.tables[name][0]
            for layer in stepper.caches[name]:
                rows = layer[entry][table].flatten(0, 1)
                assert int((rows != 0).any(-1).sum()) == end // 4, (name, end)


def test_expert_counts_add_up(tiny: Fixture) -> None:
    stepper = tiny.stepper()
    stepper.run(tiny.first.tokens, chunk_ends(LENGTH, 9))
    counts = stepper.model.expert_counts()
    assert counts.shape == (4, 9)
    assert counts[:, :-1].sum(1).tolist() == [2 * LENGTH] * 4
    assert counts[:, -1].tolist() == [0] * 4


def test_near_ties_are_rare(tiny: Fixture) -> None:
    """Positions excused by a near tie of index scores stay under one in a hundred."""
    more = random_model(SEED + 7)
    for seed in range(6):
        found = oracle(more, random_tokens(SEED + 10 + seed, LENGTH))
        checked["positions"] += LENGTH
        checked["near_ties"] += len(found.near_ties)
    assert checked["near_ties"] < 0.01 * checked["positions"], told(str(checked))


def test_float32_agrees_to_a_fifth_of_the_tolerance(tiny: Fixture) -> None:
    """Room between rounding and mistakes: a real difference is never mistaken for noise. In nine rows of ten, since
    a row whose experts or entries nearly tie magnifies rounding, for one seed in some hundreds beyond a fifth."""
    found = tiny.stepper().step([(0, tiny.first.tokens, 0)])
    clean = min(tiny.first.near_ties, default=LENGTH)
    rows = (found - tiny.first.logprobs)[:clean].abs().amax(-1)
    assert float(rows.quantile(0.9)) < TOLERANCE / 5, told("margin")


def test_bfloat16_runs_in_any_chunks_and_stays_near_float32(tiny: Fixture) -> None:
    """16-bit streams lose digits, not meaning: the distributions stay close, however the text is cut."""
    settings: dict[str, Any] = {"model.dtype": "bfloat16"}
    one_shot = Stepper(tiny.path, **settings).step([(0, tiny.first.tokens, 0)])
    chunked = Stepper(tiny.path, **settings).run(tiny.first.tokens, chunk_ends(LENGTH, 5))
    for found in (one_shot, chunked):
        divergence = (found.exp() * (found - tiny.first.logprobs)).sum(-1)
        assert float(divergence.median()) < 0.1, told("bfloat16")
